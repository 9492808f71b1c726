"""Measures the memory and the traffic of a rank that trains, beside what the formulas say."""

import math

import pytest
import torch

import train
from benchmarks import comm, memory
from benchmarks.common import RandomTokens
from nanodomino.analysis import expected_traffic
from nanodomino.domino import Domino
from nanodomino.mesh import make_mesh
from nanodomino.zero import ZeroOptimizer

ACTIVATIONS = 1e-3       # relative: of the tape every tensor has its term, so another one, or one less, shows
PEAK = 0.08              # relative: an estimate


def held_rank(config):
    """Return (measured, predicted) memory and (measured, predicted) traffic of this rank."""
    mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"), ep=config.ep, cp=config.cp)
    model = train.model_builder(config, mesh)
    optimizer, stage = ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns)
    dataset = RandomTokens(config)
    held = memory.measure(config, mesh, optimizer, stage, dataset)
    with comm.CollectiveCounter(mesh) as listener:
        train.train_step(3, stage, optimizer, dataset, config, mesh)
    expected = expected_traffic.totals_by_group(expected_traffic.step_traffic(config, mesh))
    return (held, memory.predict(config, mesh)), (listener.counts, expected)


def check_memory(held, said, peak=math.inf):
    """Check a rank's memory: state is exact, activations nearly, and the peak differs by at most `peak`, relative."""
    assert {name: held[name] for name in memory.STATE} == {name: said[name] for name in memory.STATE}
    assert held["activations"] == pytest.approx(said["activations"], rel=ACTIVATIONS)
    assert held["peak"] == pytest.approx(said["peak"], rel=peak)
