"""The balancer's metrics for Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from balance.counts import BUCKETS_S, Counts
from balance.reports import Reports
from balance.values import Service
