"""Attention kernels of a policy, read from its source."""

from __future__ import annotations

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.attention import attention_kernels, attention_refusal, default_attention
from benchbox.registry.policies import PolicyEntry, find_policies, policy_entry

ADAPTED = "import benchbox\n\ndef build(preset, axes):\n    return benchbox.adapt(M(), loss=l, batch=b)\n"


@pytest.fixture
def entry(tmp_path):
    def write(source):
        (tmp_path / "policy.py").write_text(source)
        return PolicyEntry("p", tmp_path, {})

    return write


@pytest.mark.parametrize("name", find_policies())
def test_the_bundled_policies_switch_to_every_kernel_and_run_sdpa(name):
    assert attention_kernels(policy_entry(name)) == ("eager", "sdpa", "flex")
    assert default_attention(policy_entry(name)) == "sdpa"


@pytest.mark.parametrize("source", [ADAPTED, "from benchbox import adapt\nbuild = lambda preset, axes: adapt(M())\n"])
def test_an_adapted_module_runs_what_it_runs(entry, source):
    assert attention_kernels(entry(source)) == ("native",)
    assert default_attention(entry(source)) == "native"
    assert attention_refusal(entry(source), "native") is None
    message, hint = attention_refusal(entry(source), "sdpa")
    assert (message, hint) == ("policy p cannot switch its attention to sdpa", "write attention: native, or leave it out")


def test_a_declaration_counts_for_more(entry):
    assert attention_kernels(entry(f'ATTENTION = ("eager", "native")\n{ADAPTED}')) == ("eager", "native")
    assert default_attention(entry(f'ATTENTION = ("eager", "native")\n{ADAPTED}')) == "eager"
    assert attention_kernels(entry('ATTENTION = "native"')) == ("native",)
    assert attention_kernels(entry('ATTENTION: tuple[str, ...] = ("eager", "native")\n')) == ("eager", "native")


@pytest.mark.parametrize("value", ["('flash',)", "()", "3", "KERNELS", "(['eager'],)", "{['eager']}"])
def test_a_declaration_of_anything_else_is_one_error_with_its_line(entry, value):
    with pytest.raises(ConfigurationError, match=r"policy.py:2:1: ATTENTION is a tuple of eager, sdpa, flex, native"):
        attention_kernels(entry(f"\nATTENTION = {value}\n"))
