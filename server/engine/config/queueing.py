"""Queue policies: those of dynamic_batching, and the parameters for models with another scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.backends.api import QueuePolicySpec, QueueSpec
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import QUEUE_PREFIX, of_server
from inferd.server.engine.pbtxt.source import FieldPath
from inferd.server.pb import model_config_pb2 as pb

MAX_LEVELS = 256

OF_SEQUENCES = ("max_queue_size", "default_timeout_microseconds")
"""The parameters that models with sequence_batching take; a late request of theirs cannot be moved behind others."""

DELAY = pb.ModelQueuePolicy.DELAY


def queue_spec(config: pb.ModelConfig) -> QueueSpec:
    """How requests wait for the model, with any scheduler; its configuration obeys the rules below."""
    if not config.HasField("dynamic_batching"):
        return QueueSpec((_from_parameters(config),))
    batching = config.dynamic_batching
    default = batching.default_queue_policy
    chosen = batching.priority_queue_policy
    levels = min(batching.priority_levels, MAX_LEVELS)
    return QueueSpec(
        levels=tuple(_policy(chosen.get(i, default)) for i in range(1, levels + 1)) or (_policy(default),),
        default_level=batching.default_priority_level or 1,
        preserve_ordering=batching.preserve_ordering,
    )


def _policy(policy: pb.ModelQueuePolicy) -> QueuePolicySpec:
    return QueuePolicySpec(
        max_size=policy.max_queue_size,
        timeout_us=policy.default_timeout_microseconds,
        overridable=policy.allow_timeout_override,
        yields=policy.timeout_action == DELAY,
    )


def _from_parameters(config: pb.ModelConfig) -> QueuePolicySpec:
    own = of_server(config)
    return QueuePolicySpec(
        max_size=own[f"{QUEUE_PREFIX}max_queue_size"],
        timeout_us=own[f"{QUEUE_PREFIX}default_timeout_microseconds"],
        overridable=own[f"{QUEUE_PREFIX}allow_timeout_override"],
        yields=own[f"{QUEUE_PREFIX}timeout_action"] == "DELAY",
    )


def queue_rules(config: pb.ModelConfig) -> Iterator[Finding]:
    """Findings about queue policies, with Triton's texts."""
    scheduler = config.WhichOneof("scheduling_choice")
    for key in config.parameters:
        field = key.removeprefix(QUEUE_PREFIX)
        path: FieldPath = ("parameters", key)
        if not key.startswith(QUEUE_PREFIX):
            continue
        if scheduler == "dynamic_batching":
            way_out = f"write dynamic_batching {{ default_queue_policy {{ {field} }} }}"
            yield Finding(path, f"parameter '{key}' is for models without dynamic_batching", way_out)
        elif scheduler == "sequence_batching" and field not in OF_SEQUENCES:
            way_out = "remove it: a late sequence is refused, and a request's timeout may shorten its time"
            yield Finding(path, f"parameter '{key}' is for models without sequence_batching", way_out)
    batches = scheduler == "dynamic_batching" and config.max_batch_size > 0
    if of_server(config)["adaptive_queue_delay"] and not batches:
        text = "parameter 'adaptive_queue_delay' is for models with max_batch_size and dynamic_batching"
        yield Finding(("parameters", "adaptive_queue_delay"), text, "remove it")
    if scheduler != "dynamic_batching":
        return
    yield from _priorities(config.dynamic_batching)
    if config.dynamic_batching.preserve_ordering:
        yield from _ordering(config)


def _priorities(batching: pb.ModelDynamicBatching) -> Iterator[Finding]:
    levels = batching.priority_levels
    default: FieldPath = ("dynamic_batching", "default_priority_level")
    chosen: FieldPath = ("dynamic_batching", "priority_queue_policy")
    if levels > MAX_LEVELS:
        path = ("dynamic_batching", "priority_levels")
        yield Finding(path, f"at most {MAX_LEVELS} priority levels are served", f"got {levels}")
    elif levels == 0:
        for field, given in ((default, batching.default_priority_level), (chosen, batching.priority_queue_policy)):
            if given:
                yield Finding(field, f"{field[-1]} has no effect without priority_levels", "write priority_levels")
    else:
        if not 1 <= batching.default_priority_level <= levels:
            text = f"default priority level must be in range [1, {levels}]"
            yield Finding(default, text, f"got {batching.default_priority_level}")
        for level in batching.priority_queue_policy:
            if not 1 <= level <= levels:
                text = f"priority queue policy must have priority level in range [1, {levels}]"
                yield Finding((*chosen, str(level)), text, f"got {level}")


def _ordering(config: pb.ModelConfig) -> Iterator[Finding]:
    batching = config.dynamic_batching
    path: FieldPath = ("dynamic_batching", "preserve_ordering")
    if batching.priority_levels > 1:
        text = "Only one priority level is allowed when 'preserve_ordering' is true"
        yield Finding(path, text, "remove priority_levels or preserve_ordering")
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(each.timeout_action == DELAY and each.default_timeout_microseconds for each in policies):
        text = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
        yield Finding(path, text, "write timeout_action: REJECT")
    if config.response_cache.enable or of_server(config)["coalesce_requests"]:
        text = "'preserve_ordering' can not be combined with 'response_cache' or coalesce_requests"
        yield Finding(path, text, "remove one of them: known answers would have to wait for others")
