"""Builds both ends of weight publication as the topology asks for them."""

from seed_async.role import RoleContext
from seed_async.weights.broadcast import BroadcastSource, BroadcastTransport
from seed_async.weights.control_rpc import RpcControl, RpcLink
from seed_async.weights.control_zmq import ZmqControl, ZmqLink
from seed_async.weights.publisher import WeightPublisher
from seed_async.weights.receiver import WeightReceiver
from seed_async.weights.seams import ControlLink, ControlPlane, Deadlines, ReceiverRole, WeightSource, WeightTransport
from seed_async.weights.segments import SegmentSource, SegmentStore

HOST = "127.0.0.1"
"""Where the publisher's stores listen; a topology knows one host so far."""


def deadlines_of(context: RoleContext) -> Deadlines:
    """The deadlines of the phases; a receiver that lets requests finish has longer for the last one."""
    weights = context.topology.weights
    finish_s = weights.finish_timeout_s if weights.in_flight == "finish" else 0.0
    return Deadlines(weights.transfer_timeout_s, weights.verify_timeout_s, weights.acknowledge_timeout_s + finish_s)


def open_publisher(context: RoleContext) -> WeightPublisher:
    """The learner's end."""
    topology, run_dir, log = context.topology, context.run_dir, context.log
    weights, deadlines = topology.weights, deadlines_of(context)
    control: ControlPlane
    transport: WeightTransport
    if weights.control == "rpc":
        control = RpcControl(run_dir.rendezvous, weights.interface, HOST, log)
    else:
        control = ZmqControl(context.serve(run_dir.weights_endpoint(topology)))
    if weights.transport == "shm":
        transport = SegmentStore(run_dir.segments())
    else:
        transport = BroadcastTransport(weights.transport, weights.interface, HOST, deadlines.transfer_s, log)
    return WeightPublisher(control, transport, deadlines, log)


def open_receiver(context: RoleContext, role: ReceiverRole) -> WeightReceiver:
    """The end of a policy server or an analyzer."""
    topology, run_dir, log = context.topology, context.run_dir, context.log
    weights, name = topology.weights, f"{context.name}:{context.incarnation}"
    link: ControlLink
    source: WeightSource
    if weights.control == "rpc":
        link = RpcLink(run_dir.rendezvous, weights.interface, name, log)
    else:
        link = ZmqLink(context.connect(run_dir.weights_endpoint(topology), "learner-0"))
    if weights.transport == "shm":
        source = SegmentSource()
    else:
        source = BroadcastSource(weights.transport, weights.interface, name)
    return WeightReceiver(link, source, name, role, deadlines_of(context), log)
