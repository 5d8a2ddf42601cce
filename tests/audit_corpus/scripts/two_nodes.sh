#!/bin/sh
# Two nodes of one rank each in two network namespaces, joined by a veth pair: two_nodes.sh SCRIPT ARGUMENTS.
# Where namespaces cannot be made, both agents run on this host.
suffix=$$
leave() { ip netns del "corpus-a-$suffix" 2>/dev/null; ip netns del "corpus-b-$suffix" 2>/dev/null; }
trap leave EXIT
address=127.0.0.1
enter_a= enter_b=
if ip netns add "corpus-a-$suffix" 2>/dev/null && ip netns add "corpus-b-$suffix" 2>/dev/null; then
    ip link add "ca$suffix" netns "corpus-a-$suffix" type veth peer name "cb$suffix" netns "corpus-b-$suffix"
    for side in a b; do
        [ $side = a ] && host=1 || host=2
        ip -n "corpus-$side-$suffix" addr add "10.213.0.$host/24" dev "c$side$suffix"
        ip -n "corpus-$side-$suffix" link set "c$side$suffix" up
        ip -n "corpus-$side-$suffix" link set lo up
    done
    address=10.213.0.1
    enter_a="ip netns exec corpus-a-$suffix env GLOO_SOCKET_IFNAME=ca$suffix"
    enter_b="ip netns exec corpus-b-$suffix env GLOO_SOCKET_IFNAME=cb$suffix"
fi
options="--nnodes 2 --nproc_per_node 1 --master_addr $address --master_port 29613"
$enter_a torchrun $options --node_rank 0 "$@" &
first=$!
$enter_b torchrun $options --node_rank 1 "$@" &
second=$!
wait $first && wait $second
