"""What keeps a pod's containers from running, in kubelet's and the scheduler's words."""

from typing import Final

from rollout_operator.api.conditions import Reason
from rollout_operator.plan.actions import Verdict
from rollout_operator.plan.observed import ContainerSeen, PodSeen

_IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_VOLUME_WORDS: Final = ("persistentvolumeclaim", "volume node affinity", "persistent volume")
"""Of the scheduler, where a volume keeps the pod from every node."""
CRASH_LOOP: Final = "CrashLoopBackOff"
_OOM_KILLED: Final = "OOMKilled"


def obstacle(pod: PodSeen) -> Verdict | None:
    """Return what keeps the pod's engine from being started; None where nothing is told of."""
    if pod.unschedulable:
        volume = any(word in pod.unschedulable.lower() for word in _VOLUME_WORDS)
        reason = Reason.VOLUME_UNAVAILABLE if volume else Reason.UNSCHEDULABLE
        return Verdict(reason=reason, message=f"pod {pod.name}: {pod.unschedulable}")
    for container in filter(None, (pod.weights, pod.engine)):
        # kubelet alternates between an error and its back-off: their common part is the news
        text = f"pod {pod.name}: {container.waiting_message.rpartition('ErrImagePull: ')[2]}"
        if container.waiting in _IMAGE_REASONS:
            return Verdict(reason=Reason.IMAGE_PULL_FAILED, message=text)
        if container.waiting in _CONFIG_REASONS:
            return Verdict(reason=Reason.POD_CONFIG_ERROR, message=text)
    agent = pod.weights
    if agent and not agent.running and (agent.waiting == CRASH_LOOP or agent.exit_code):
        return Verdict(
            reason=Reason.WEIGHTS_AGENT_FAILED,
            message=f"the container weights of pod {pod.name} ended: {death(agent)}",
        )
    return None


def out_of_memory(container: ContainerSeen) -> bool:
    """Tell whether the kernel ended the container since its memory limit was reached."""
    return container.exit_reason == _OOM_KILLED


def death(container: ContainerSeen) -> str:
    """Say how a container ended."""
    reason = container.exit_reason or "Error"
    if container.exit_message:
        killed = f"{reason}: " if out_of_memory(container) else ""
        return killed + container.exit_message
    return f"{reason}, exit code {container.exit_code}; see its log"
