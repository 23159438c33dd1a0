"""What the admin port of a head offers to the other nodes of its group."""

from typing import Final

from fastapi import APIRouter

from rollout_pod.nodes.head import Head
from rollout_pod.protocol import NodeBeat, NodeOrders
from rollout_pod.server.schema import problems

HEAD_PATH: Final = "/admin/v1/nodes/"


def head_routes(head: Head) -> APIRouter:
    """For the admin app: every route needs its token."""
    router = APIRouter()

    @router.post(f"{HEAD_PATH}beat", responses=problems(400, 401, 409, 413, 422, 500))
    async def beat(told: NodeBeat) -> NodeOrders:
        """A node is there; 409 if it belongs to another group, or another has its place."""
        return head.hear(told)

    return router
