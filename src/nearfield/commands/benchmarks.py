"""`nearfield bench`: measurements on this machine, each in a module of its own."""

from typing import Any

from nearfield.commands import (
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
from nearfield.commands.arguments import show_help_without_command


def add_commands(commands: Any) -> None:
    summary = "measure on this machine"
    bench = commands.add_parser("bench", help=summary, description=f"{summary.capitalize()}.")
    show_help_without_command(bench)
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
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
