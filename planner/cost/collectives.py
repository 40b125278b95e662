"""Seconds of one collective or transfer: bytes over the bandwidth its group gets, plus latency per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.arrays import Number
from planner.scenario import Job


@dataclass(frozen=True)
class Network:
    """Effective bandwidths (bytes per second, per GPU and direction) and latencies of a job's cluster."""

    link: float
    nic: float
    link_all_to_all: float
    nic_all_to_all: float
    link_latency: float
    nic_latency: float
    node_latency: float
    domain: int
    """GPUs of one fast domain."""


def network_of(job: Job) -> Network:
    """The job's network under its generation's efficiencies."""
    g = job.generation
    return Network(
        link=job.link_bytes_per_s * g.link_efficiency,
        nic=job.nic_bytes_per_s * g.nic_efficiency,
        link_all_to_all=job.link_bytes_per_s * g.link_all_to_all_efficiency,
        nic_all_to_all=job.nic_bytes_per_s * g.nic_all_to_all_efficiency,
        link_latency=g.link_latency_seconds,
        nic_latency=g.nic_latency_seconds,
        node_latency=g.node_latency_seconds,
        domain=job.fast_domain,
    )


def members_per_node(size: Number, stride: Number, domain: int) -> Number:
    """How many ranks of a group, spaced by ``stride``, share a fast domain.

    >>> int(members_per_node(64, 8, 8)), int(members_per_node(64, 2, 8)), int(members_per_node(2, 1, 8))
    (1, 4, 2)
    """
    return np.minimum(size, np.maximum(domain // stride, 1))


def group_bandwidth(net: Network, size: Number, per_node: Number) -> Number:
    """The fast link inside a node; beyond it, the NICs of the group's ranks in a node together, at most the link."""
    return np.where(size <= per_node, net.link, np.minimum(net.link, per_node * net.nic))


def group_latency(net: Network, size: Number, per_node: Number) -> Number:
    """Latency of a ring or tree of ``size`` ranks, ``per_node`` of them in a domain."""
    inside = net.link_latency * np.minimum(size, 8)
    outside = np.maximum(net.nic_latency * size, net.node_latency * size / per_node)
    return np.where(size <= per_node, inside, outside)


def all_gather_seconds(net: Network, total_bytes: Number, size: Number, per_node: Number) -> Number:
    """All-gather or reduce-scatter of ``total_bytes`` over a group; a group of one is free.

    x (n - 1) / n over the group's bandwidth, plus latency. An all-reduce is one of each.
    Source: ring algorithm, Patarasuk and Yuan 2009; latencies fitted.

    >>> from planner.cost.collectives import Network
    >>> net = Network(100e9, 10e9, 80e9, 8e9, 0.0, 0.0, 0.0, 8)
    >>> float(all_gather_seconds(net, 8e9, 8, 8)), float(all_gather_seconds(net, 8e9, 16, 1))
    (0.07, 0.75)
    """
    transfer = total_bytes * (size - 1) / size / group_bandwidth(net, size, per_node)
    return np.where(size > 1, transfer + group_latency(net, size, per_node), 0.0)


def all_to_all_seconds(net: Network, sent_bytes: Number, size: Number, per_node: Number, copies: int) -> Number:
    """All-to-all in which each token goes to ``copies`` of the ranks, once per remote node.

    ``sent_bytes`` counts every copy. Inside a domain they cross the link; beyond it each token is sent once to each
    node that it visits, then spread over the link.
    Source: hierarchical dispatch as in DeepSeek-AI 2024, section 3.2.2; expectation of distinct nodes of uniform routing.
    """
    inside = sent_bytes * (size - 1) / size / net.link_all_to_all + net.link_latency * np.minimum(size, 8)
    nodes = np.maximum(size / per_node, 1.0)
    visited = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies) / copies
    remote = sent_bytes * visited * (1.0 - 1.0 / nodes) / net.nic_all_to_all
    outside = remote + 0.5 * sent_bytes / net.link_all_to_all + group_latency(net, size, per_node)
    return np.where(size > 1, np.where(size <= per_node, inside, outside), 0.0)


def point_to_point_seconds(net: Network, sent_bytes: Number, inside: Number, latency: float) -> Number:
    """One transfer between neighbouring stages."""
    return sent_bytes / np.where(inside, net.link, net.nic) + latency
