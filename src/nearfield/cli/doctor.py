"""What is installed here and licensed how, which implementation runs and whether rightly, and what may be slow."""

import shutil
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from nearfield._types import Impl
from nearfield.cli import machine, weights
from nearfield.cli.check import Checked, relative_error
from nearfield.ops import attend, explain_choice
from nearfield.plan import Plan
from nearfield.plan import builders as planning

_BROUGHT_BY = {
    "triton": "extra triton: kernels for the GPU",
    "diffusers": "extra diffusers: `apply`",
    "transformers": "extra diffusers: pipelines that read prompts; extra retrieval: `nearfield.retrieval`",
    "nearfield-lab": "pip install nearfield-lab: `generate`, `tune`, `train` and more commands",
}
"""What installs what may be missing, and what for."""
_HOPPER = 9


def examine() -> dict[str, Any]:
    """Facts, choices and self-checks as plain values; "ok" says whether every self-check passed."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    examined = {str(device): _examine_device(device) for device in devices}
    ok = all(found["self_check"]["passed"] for found in examined.values())
    facts = machine.facts()
    slow = slow_reasons(facts, examined, has_nvidia_gpu())
    return {"ok": ok, "machine": facts, "devices": examined, "slow": slow, "weights": weights.embedded()}


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    about = report["machine"]
    known = {name: version or _missing(name) for name, version in about["versions"].items()}
    if not about["gpus"]:
        known = {name: version for name, version in known.items() if name not in ("cuda", "cudnn")}
    lines = [f"{name:<14}{version}" for name, version in known.items()]
    if about["commit"]:
        lines.append(f"{'commit':<14}{about['commit']}")
    lines.append(f"{'system':<14}{about['system']}")
    lines.append(
        f"{'cpu':<14}{about['cpu']['name']}, {about['cpu']['cores']} cores, {about['cpu']['threads']} threads"
    )
    for gpu in about["gpus"]:
        size = f"{gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors"
        lines.append(
            f"{'gpu':<14}{gpu['name']}, capability {gpu['capability']}, {size}, driver {gpu['driver']}"
        )
    lines += [f"{'gpu':<14}none that torch can use"] if not about["gpus"] else []
    for kept in report["weights"]:
        lines.append(f"{'weights':<14}{kept['file']}: {kept['licence']}, {kept['use']}")
    for name, found in report["devices"].items():
        lines += [
            "",
            f"On {name} ({found['dtype']}):",
            *choice_lines(found),
            _check_line(found["self_check"]),
        ]
    if report["slow"]:
        lines += ["", "What may be slow here:", *(f"  {reason}" for reason in report["slow"])]
    return "\n".join(lines)


def _missing(name: str) -> str:
    return f"not installed ({_BROUGHT_BY[name]})" if name in _BROUGHT_BY else "not installed"


def choice_lines(found: dict[str, Any]) -> list[str]:
    """What runs and what does not, forward and backward, said once where they agree."""
    agree = found["forward"] == found["backward"]
    lines = []
    for direction in ("forward",) if agree else ("forward", "backward"):
        choice = found[direction]
        title = "forward and backward" if agree else direction
        lines.append(f"  {title}: {choice['impl'] or 'nothing'} runs: {choice['reason']}")
        lines += [f"    not {name}: {reason}" for name, reason in choice["others"].items()]
    return lines


def _check_line(check: dict[str, Any]) -> str:
    return f"  self-check {'passed' if check['passed'] else 'FAILED'}: {check['detail']}"


def _examine_device(device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = planning.ring(600, 128, shift=32, ring=(64, 600), both=[(0, 64)], device=device)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 600, 128, generator=generator).to(device, dtype) for _ in range(4)]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "forward": choice_record(inputs[0], inputs[1], plan, backward=False),
        "backward": choice_record(inputs[0], inputs[1], plan, backward=True),
        "dense": dense_backend(*inputs[:3]),
        "self_check": _self_check(inputs, plan),
    }


def choice_record(query: Tensor, key: Tensor, plan: Plan, *, backward: bool) -> dict[str, Any]:
    """What "auto" runs and why, and for every other implementation why not."""
    try:
        choice = explain_choice(query, key, plan, backward=backward)
    except NotImplementedError as error:
        return {"impl": None, "reason": str(error), "others": {}}
    names = [name for name in get_args(Impl) if name not in ("auto", choice.impl)]
    others = {name: choice.rejected.get(name, "slower; runs only when asked for by name") for name in names}
    if "triton" in choice.rejected and not query.is_cuda and machine.versions()["triton"]:
        others["triton"] += " (impl='triton' with TRITON_INTERPRET=1 in the environment)"
    return {"impl": choice.impl, "reason": choice.reason, "others": others}


def _self_check(inputs: list[Tensor], plan: Plan) -> dict[str, Any]:
    """A small call, forward and backward, against the reference in float64."""
    try:
        got = _results(inputs, plan, "auto")
    except Exception as error:  # whatever breaks here is the finding
        return {"passed": False, "relative_error": None, "detail": f"{type(error).__name__}: {error}"}
    exact = _results([x.cpu().double() for x in inputs], plan.to("cpu"), "reference")
    low = _eager_results(inputs, plan)
    names = ("out", "query gradient", "key gradient", "value gradient")
    worst = max(
        (
            Checked(
                relative_error(x.cpu(), y), 2 * relative_error(z.cpu(), y) + torch.finfo(x.dtype).eps, name
            )
            for name, x, y, z in zip(names, got, exact, low, strict=True)
        ),
        key=lambda checked: checked.error / checked.limit if checked.error == checked.error else float("inf"),
    )
    return {
        "passed": worst.passed,
        "relative_error": worst.error,
        "detail": f"{worst} against the float64 reference",
    }


def _results(inputs: list[Tensor], plan: Plan, impl: Impl) -> list[Tensor]:
    query, key, value = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(query, key, value, plan, impl=impl).out
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def _eager_results(inputs: list[Tensor], plan: Plan) -> list[Tensor]:
    query, key, value = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    out = torch.softmax(scores.masked_fill(~plan.to_mask(), float("-inf")), -1) @ value
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


# -- what may be slow ------------------------------------------------------------------------------------------------


def dense_backend(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What torch would choose for dense attention: flash_attention, cudnn_attention, math ..."""
    return SDPBackend(torch._fused_sdp_choice(query, key, value)).name.lower()


def has_nvidia_gpu() -> bool:
    """Whether the driver sees a GPU, be torch able to use it or not."""
    return shutil.which("nvidia-smi") is not None and bool(machine.output("nvidia-smi", "-L"))


def slow_reasons(facts: dict[str, Any], devices: dict[str, Any], has_gpu: bool) -> list[str]:
    """Sentences for people; none where nothing is known to be slow.

    Args:
        facts: as `machine.facts` gives them.
        devices: as `examine` gives them.
        has_gpu: whether the driver sees a GPU.
    """
    found = list(_of_gpus(facts, devices) if facts["gpus"] else _without_gpu(facts, has_gpu))
    cores, threads, load = facts["cpu"]["cores"], facts["cpu"]["threads"], facts["load"]
    if 2 * threads < cores:
        found.append(f"torch uses {threads} threads of {cores} cores: look at OMP_NUM_THREADS.")
    if load is not None and load > 1.5 * cores:
        found.append(f"The machine is busy, a load of {load:g} on {cores} cores: times say little.")
    return found


def _without_gpu(facts: dict[str, Any], has_gpu: bool) -> Iterator[str]:
    cuda = facts["versions"]["cuda"]
    if not has_gpu:
        yield "There is no GPU: everything runs on the CPU, which is for small sizes and a first look."
    elif cuda is None:
        yield "There is a GPU, but this torch was built without CUDA: install a build for CUDA."
    else:
        yield f"There is a GPU that torch, built for CUDA {cuda}, cannot use: the driver may be too old for it."


def _of_gpus(facts: dict[str, Any], devices: dict[str, Any]) -> Iterator[str]:
    if facts["versions"]["triton"] is None:
        yield "Triton is not installed, so there are no kernels: `pip install 'nearfield[triton]'`."
    for index, gpu in enumerate(facts["gpus"]):
        device = f"cuda:{index}"
        about, is_hopper = devices[device], int(gpu["capability"].split(".")[0]) == _HOPPER
        impl, others = about["forward"]["impl"], about["forward"]["others"]
        if is_hopper and impl != "gluon" and "gluon" in others:
            yield f"{device}: the kernel for Hopper does not run ({others['gluon']}); the plain ones are slower."
        if is_hopper and about["dense"] == "flash_attention":
            yield (
                f"{device}: torch's dense attention is FlashAttention-2, and cuDNN's was twice as fast on an H200. What"
                " stays dense gains from `torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)`."
            )
        if about["dense"] == "math":
            yield f"{device}: torch's dense attention is not fused here; what stays dense is slow, and takes memory."
    yield "In float32 kernels do without tensor cores: load models with `torch_dtype=torch.bfloat16`."
