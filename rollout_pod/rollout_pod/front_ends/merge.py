"""The metrics of several processes in one text."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "front_end"
"""Names the process: its index, or ``main`` for the one that steers."""


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, LABEL: name}))
        return families.values()


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """One exposition of several: each sample gets the label ``front_end``. Not on a loop's
    thread: an engine has hundreds of metrics.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)
