"""Prometheus pages of engines, read over some time.

Counters and histograms are taken as differences between the first and the last page, gauges as
means over all. Names are looked up by what they mean, newest first: vLLM renamed some of them over
the years (`gpu_cache_usage_perc` became `kv_cache_usage_perc`, `time_per_output_token_seconds`
became `inter_token_latency_seconds`) and added others after June 2026.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit, urlunsplit

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from twostroke.advice.observation import UNKNOWN
from twostroke.errors import ConfigError

MAX_PAGE_BYTES = 32 << 20
TIMEOUT_S = 10.0
LEAST_SPREAD = 1.25  # of a batch over time, for its elasticity to be told
FEWEST_POINTS = 4
PREFIXES = ("twostroke:", "vllm:")

Labels = frozenset[tuple[str, str]]


class Page:
    """The samples of one page, by name without the engine's prefix, and by labels."""

    def __init__(self, text: str, source: str, time_s: float) -> None:
        self.source, self.time_s = source, time_s
        self._samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.name
                    for prefix in PREFIXES:
                        name = name.removeprefix(prefix)
                    self._samples[name][frozenset(sample.labels.items())] = float(sample.value)
        except (ValueError, KeyError, IndexError) as error:
            raise _no_metrics(source, f"{error}") from None
        if not any(name.startswith("num_requests_running") for name in self._samples):
            raise _no_metrics(source, "num_requests_running is not among its metrics")

    def of(self, names: Sequence[str]) -> dict[Labels, float]:
        """The samples of the first of `names` that the page has; counters may end in _total."""
        for name in names:
            for full in (name, f"{name}_total"):
                if full in self._samples:
                    return self._samples[full]
        return {}

    def total(self, *names: str, **labels: str) -> float:
        """Sum over samples with these labels; not known without any."""
        wanted = set(labels.items())
        found = [value for keys, value in self.of(names).items() if wanted <= keys]
        return sum(found) if found else UNKNOWN

    def mean(self, *names: str) -> float:
        """Mean over engines."""
        found = self.of(names)
        return sum(found.values()) / len(found) if found else UNKNOWN

    def label(self, name: str, label: str) -> list[str]:
        """The values of a label over the samples of `name`."""
        return [value for keys in self.of([name]) for key, value in keys if key == label]

    def pool_tokens(self) -> float:
        """Tokens of one engine's KV pool, from the labels of cache_config_info."""
        try:
            blocks = [float(value) for value in self.label("cache_config_info", "num_gpu_blocks")]
            sizes = [float(value) for value in self.label("cache_config_info", "block_size")]
        except ValueError:  # "None" until the engine knows
            return UNKNOWN
        return sum(blocks) / len(blocks) * sizes[0] if blocks and sizes else UNKNOWN

    def num_engines(self) -> int:
        """How many engines speak through this page."""
        return max(1, len(self.of(["num_requests_running"])))


@dataclass(frozen=True)
class Series:
    """Pages of one endpoint, oldest first: at least one."""

    pages: tuple[Page, ...]

    @property
    def window_s(self) -> float:
        return self.pages[-1].time_s - self.pages[0].time_s

    def parts(self) -> "list[Series]":
        """Each page with the one after it."""
        return [Series(pair) for pair in pairwise(self.pages)]

    def gauge(self, *names: str, **labels: str) -> float:
        """A gauge's mean over time, summed over the page's engines."""
        return _mean([page.total(*names, **labels) for page in self.pages])

    def gauge_mean(self, *names: str) -> float:
        """A gauge's mean over time and engines."""
        return _mean([page.mean(*names) for page in self.pages])

    def share_above_zero(self, *names: str) -> float:
        """Share of the pages on which a gauge is above zero."""
        values = [page.total(*names) for page in self.pages]
        return (
            sum(value > 0 for value in values) / len(values) if values[0] == values[0] else UNKNOWN
        )

    def grown(self, *names: str, **labels: str) -> float:
        """By how much a counter grew. A restart in between makes it unknown."""
        last = self.pages[-1].total(*names, **labels)
        first = self.pages[0].total(*names, **labels) if len(self.pages) > 1 else 0.0
        # A labelled sample appears with its first event: before, it was zero.
        first = 0.0 if first != first and last == last else first
        return last - first if last >= first else UNKNOWN


def read(
    urls: Sequence[str],
    seconds: float,
    *,
    progress: Callable[[float], None] = lambda share: None,
    pause: Callable[[float], None] = time.sleep,
) -> list[Series]:
    """Read each endpoint repeatedly for so long (0: once, then totals since its start count).

    Raises ConfigError for an endpoint that cannot be reached or serves no metrics.
    """
    looks = 1 if seconds <= 0 else max(2, min(30, round(seconds / 2)))
    pages: list[list[Page]] = [[] for _ in urls]
    started_s = time.monotonic()
    with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
        for look in range(looks):
            if look:
                due_s = started_s + seconds * look / (looks - 1)
                pause(max(0.0, due_s - time.monotonic()))
            for url, found in zip(urls, pages, strict=True):
                found.append(fetch(client, url))
            progress((look + 1) / looks)
    return [Series(tuple(found)) for found in pages]


def fetch(client: httpx.Client, url: str) -> Page:
    """One page. `url` may be the server's or that of its /metrics."""
    address = metrics_url(url)
    try:
        with client.stream("GET", address) as response:
            if response.status_code != httpx.codes.OK:
                raise _no_metrics(address, f"it answers {response.status_code}")
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    raise _no_metrics(address, f"it sends more than {MAX_PAGE_BYTES >> 20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"cannot read {address}: {error or type(error).__name__}",
            hint="is the engine running there, and is its port reachable from here?",
        ) from None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise _no_metrics(address, "it does not answer text") from None
    return Page(text, address, time.monotonic())


def metrics_url(url: str) -> str:
    """The address of /metrics beside a server's address, with or without /v1."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of a server", hint="as http://host:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope, 0 to 1; not known where x (a logarithm) hardly varies."""
    if len(points) < FEWEST_POINTS:
        return UNKNOWN
    x, y = np.array(points).T
    if x.max() - x.min() < math.log(LEAST_SPREAD):
        return UNKNOWN
    return min(1.0, max(0.0, float(np.polyfit(x, y, 1)[0])))


def _no_metrics(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"{address} serves no metrics of an engine: {why}",
        hint="give the address of a vLLM or twostroke server",
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else UNKNOWN
