from __future__ import annotations

from benchbox.theory.flops import Cost, Product, sum_costs, total_cost, training_cost


def cost(*products: Product) -> Cost:
    return total_cost(training_cost(products))


def product(gradients: int, tower: str = "expert", **options: object) -> Product:
    return Product(tower=tower, flops=10, gradients=gradients, **options)


def test_a_trained_layer_costs_twice_its_forward_in_backward_and_once_where_only_one_factor_needs_a_gradient():
    """The gradient of each factor is one product more: of the weight, and of the input."""
    assert [cost(product(gradients)) for gradients in (0, 1, 2)] == [Cost(forward=10, backward=back) for back in (0, 10, 20)]


def test_a_fused_kernel_forms_its_scores_again_and_that_is_not_the_models_work():
    scores, answer = product(2, fused=True), product(2)
    fused = cost(scores, answer)
    assert (fused.model, fused.hardware) == (60, 70)  # 2 forward, 4 backward; 5 in the kernel: 2.5 of the forward
    assert cost(product(0, fused=True)).recomputed == 0  # nothing to go backward for


def test_a_checkpointed_unit_runs_again_up_to_the_last_product_that_backward_needs_the_factors_of():
    start, middle = product(2, unit=0), product(2, unit=0)
    assert cost(start, middle) == Cost(forward=20, backward=40, recomputed=10)
    saved = product(2, unit=0, saved=True)  # a norm follows
    assert cost(start, saved).recomputed == 20
    frozen = product(0, unit=0)
    assert cost(start, middle, frozen).recomputed == 10
    assert cost(frozen, frozen, middle).recomputed == 20  # what is frozen runs again where something behind it trains
    assert cost(frozen, frozen).recomputed == 0
    assert cost(start, product(2, unit=1)).recomputed == 0  # each of one product, whose factors are there


def test_towers_are_apart_and_micro_batches_add_up():
    step = training_cost([product(2, "vision"), product(1, "expert"), product(2, "vision")])
    assert step == {"vision": Cost(forward=20, backward=40), "expert": Cost(forward=10, backward=10)}
    assert sum_costs([step, step, {"head": Cost(forward=1)}]) == {
        "vision": Cost(forward=40, backward=80),
        "expert": Cost(forward=20, backward=20),
        "head": Cost(forward=1),
    }
