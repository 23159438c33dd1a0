"""What the operator counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "rollout_operator_reconciles",
            "Passes over a replica, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "rollout_operator_reconcile_seconds",
            "Seconds that a pass took",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "rollout_operator_reconcile_errors",
            "Passes that failed, by reason: what the API server said, or the error's own name",
            ["reason"],
            registry=self.registry,
        )
        self.update_seconds = Histogram(
            "rollout_operator_weight_update_seconds",
            "Seconds of weight updates that committed, by step, as their pods told them",
            ["step"],
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=self.registry,
        )
        self.api_requests = Counter(
            "rollout_operator_api_requests",
            "Requests to the API server (those of the watches are not counted)",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.pod_requests = Counter(
            "rollout_operator_pod_requests",
            "Requests to pods' admin ports, by what became of them",
            ["verb", "outcome"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "rollout_operator_leader",
            "1 while this operator works: it holds the Lease, or needs none",
            registry=self.registry,
        )
        self.replicas = Gauge(
            "rollout_operator_replicas", "Replicas that have a worker", registry=self.registry
        )
        self.queued = Gauge(
            "rollout_operator_queue_depth",
            "Replicas that are due and wait for their turn",
            registry=self.registry,
        )
        self.polls = Gauge(
            "rollout_operator_pod_polls", "Pods whose state is watched", registry=self.registry
        )
        self.actions = Counter(
            "rollout_operator_actions",
            "What was done to the cluster, by kind",
            ["action"],
            registry=self.registry,
        )
        self.restarts = Counter(
            "rollout_operator_replica_restarts",
            "Ends of pods and engines that were counted in a status, by reason",
            ["reason"],
            registry=self.registry,
        )
