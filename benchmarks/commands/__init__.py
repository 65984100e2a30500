"""`python -m benchmarks`: measurements on this machine, each in a module of its own."""

from typing import Any

from benchmarks.commands import (
    attend_benchmark,
    call_benchmarks,
    errors_benchmark,
    hilbert_benchmark,
    model_benchmark,
    pareto_benchmark,
    pixel_benchmark,
    quality_benchmark,
    recall_benchmark,
    retrieval_benchmark,
    scaling_benchmark,
)


def add_commands(benchmarks: Any) -> None:
    attend_benchmark.add_command(benchmarks)
    errors_benchmark.add_command(benchmarks)
    call_benchmarks.add_fine(benchmarks)
    hilbert_benchmark.add_command(benchmarks)
    call_benchmarks.add_loglinear(benchmarks)
    model_benchmark.add_command(benchmarks)
    pareto_benchmark.add_command(benchmarks)
    pixel_benchmark.add_command(benchmarks)
    quality_benchmark.add_command(benchmarks)
    recall_benchmark.add_command(benchmarks)
    retrieval_benchmark.add_command(benchmarks)
    scaling_benchmark.add_command(benchmarks)
