"""The checks of `bench.py gpu` that need one device: the machine, and the kernels that training calls.

Each kernel is called through nanodomino's own function and compared with the same mathematics in float64. A result
rounded to bfloat16 errs by up to 2^-9, a number in 8 bits by 2^-4 (e4m3) or 2^-3 (e5m2), and a wrong scale by more.

A kernel's floor is FLOOR times the speed that `bench.py plan` assumes. The report names slower kernels, which may pass.
"""

import importlib.metadata
import os
import subprocess
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils.benchmark import Timer

from benchmarks import plan
from benchmarks.runner import gathered
from nanodomino.comm.device import capability_of, has_flash_attention
from nanodomino.errors import require
from nanodomino.estimate.accounts import Accounts
from nanodomino.estimate.formulas import GPUS
from nanodomino.layers.attention import fused_attention, varlen_attention
from nanodomino.layers.attention_mask import AttentionMask, document_begins
from nanodomino.layers.gradients import add_weight_gradient, run_segment
from nanodomino.options.experts import grouped_linear
from nanodomino.options.fp8 import FORMATS, RECIPES, Fp8Recipe, Fp8Weight

BF16 = 2.0**-8               # bound for a result in bfloat16; with more roundings on the way to it, a multiple
FLOOR = 0.5                  # the least share of the assumed speed
MEASURABLE = 1e-4            # seconds; a kernel that takes less has no floor, because launching it takes as long


class Run:
    """Says where a check runs, and holds what it finds. quick: small sizes; gpu: the GPU's key in GPUS, or None."""

    def __init__(self, device: torch.device, quick: bool, world_size=1):
        self.device, self.cuda, self.quick, self.world_size = device, device.type == "cuda", quick, world_size
        self.free = min(gathered(torch.cuda.mem_get_info(device)[0])) if self.cuda else 0      # on all ranks alike
        self.large = self.free > 8e9 and not quick             # whether to include the sizes of real models
        self.has_fp8 = self.cuda and capability_of(device) >= (8, 9)    # a CPU needs minutes
        name = torch.cuda.get_device_name(device) if self.cuda else ""
        self.gpu = max((key for key in GPUS if key in name), key=len, default=None)
        self.numbers, self.slow, self.mesh = {}, [], None      # slow: the kernels below their floors

    def normal(self, *shape, seed=0, dtype=torch.bfloat16):
        """Return normal random numbers whose columns differ in size by up to 100, so that a wrong scale shows."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return (x * torch.logspace(-1, 1, shape[-1])).to(self.device, dtype)

    def equal(self, case: str, found, expected, bound: float):
        """Raise UserError unless the norm of found - expected is at most `bound` times the norm of `expected`."""
        found, expected = found.detach().double(), expected.detach().double()
        error = self.numbers[case] = ((found - expected).norm() / expected.norm().clamp(min=1e-300)).item()
        require(error <= bound,                      # false for NaN
                f"{case}: relative error {error:.2e}, but at most {bound:.1e} is allowed; please send the report")

    def speed(self, case: str, function):
        """Add the speed of a kernel, in TFLOP/s or, if it multiplies no matrices, in GB/s."""
        with Accounts({}, host_counts=not self.cuda) as work, torch.compiler.set_stance("force_eager"):
            function()
        flops, size = (sum(getattr(each, name) for each in work.events) for name in ("flops", "bytes"))
        amount, unit = (flops / 1e12, "TFLOP/s") if flops else (size / 1e9, "GB/s")
        speed = amount / Timer("function()", globals={"function": function}).timeit(10 if self.cuda else 1).mean
        assumed = sum(map(plan.machine_of(self.gpu).operation_seconds, work.events)) if self.gpu else 0.0
        floor = FLOOR * amount / assumed if assumed > MEASURABLE else 0.0
        self.numbers[f"{case}, {unit}"] = f"{speed:.3g}" + f", floor {floor:.3g}" * (floor > 0)
        self.slow.extend([case] * (speed < floor))


def machine(run: Run):
    """The hardware, driver, libraries and variables to which the other figures belong."""
    run.numbers.update(
        torch=torch.__config__.show(), packages={one.name: one.version for one in importlib.metadata.distributions()},
        variables={name: value for name, value in os.environ.items() if name.startswith(
            ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "CUBLAS"))})
    for command in ["lscpu", "numactl --hardware"] + ["nvidia-smi topo -m", "nvidia-smi --format=csv --query-gpu=name,"
            "driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,pci.bus_id"] * run.cuda:
        run.numbers[command] = f"\n{subprocess.getoutput(command)}"


def weight_gradients(run: Run):
    """A weight gradient is added to fp32 without rounding it first, also for no tokens, few rows and padding rows."""
    for tokens, outputs, inputs in [(0, 48, 32), (1, 48, 32), (17, 40, 24), (512, 384, 128),
                                    *[(8192, 4096, 4096)] * run.large]:
        gradient = run.normal(1, tokens, outputs + 16)[..., :outputs]       # a view with gaps between its rows
        x, total = run.normal(1, tokens, inputs, seed=1), run.normal(outputs + 8, inputs, seed=2, dtype=torch.float32)
        expected = total.double()
        expected[:outputs] += gradient[0].double().t() @ x[0].double()
        add_weight_gradient(total, gradient, x)
        name = f"{tokens} x {outputs} x {inputs}"
        # CPUs round the product to bfloat16. Tensor cores cut sums off to fp32: 8192 addends err by up to 3e-5
        run.equal(name, total, expected, 1e-4 if run.cuda else BF16)
    run.speed(name, lambda: add_weight_gradient(total, gradient, x))


def fp8_matmuls(run: Run) -> str:
    """The three fp8 matmuls equal those in float64 up to 8-bit rounding; they keep zeros and hide no inf or NaN."""
    if run.cuda and not run.has_fp8:
        return "needs a GPU of compute capability 8.9 or higher"
    h = 4096 if run.large else 64
    for form, recipe, tokens in product(FORMATS, RECIPES, (16, 128, *[8192] * run.large)):
        x, gradient = run.normal(1, tokens, h), run.normal(1, tokens, 2 * h, seed=1)
        parameter = torch.nn.Parameter(run.normal(2 * h, h, seed=2))
        parameter.bucket, parameter.main_grad = SimpleNamespace(derived={}), torch.zeros_like(parameter).float()
        weight = Fp8Weight(parameter, Fp8Recipe(form, recipe, torch.bfloat16, lambda function: function))
        y, grad_x = weight.multiply(x), weight.t().multiply(gradient)
        weight.add_gradient(gradient, x)
        x64, g64, w64 = x[0].double(), gradient[0].double(), parameter.detach().double()
        name, bound = f"{form} {recipe} {tokens}", 0.12 if form == "hybrid" else 0.06
        run.equal(f"{name} forward", y[0], x64 @ w64.t(), 0.06)
        run.equal(f"{name} input gradient", grad_x[0], g64 @ w64, bound)
        run.equal(f"{name} weight gradient", parameter.main_grad, g64.t() @ x64, bound)
        run.equal(f"{name} chunks of W", torch.cat([part.multiply(x) for part in weight.chunk(2, 0)], -1), y, BF16)
        run.equal(f"{name} zeros", weight.multiply(torch.zeros_like(x)), torch.zeros_like(y), 0.0)
        if run.cuda:
            run.speed(name, partial(weight.multiply, weight.convert(x)))
        for bad in (torch.inf, -torch.inf, torch.nan):
            x[0, 3, 5] = bad
            finite = weight.multiply(x)[0, 3].isfinite()
            run.equal(f"{name} finite results of {bad}", finite, torch.zeros_like(finite), 0.0)


def expert_matmuls(run: Run):
    """The experts' grouped matmul equals one matmul per expert, with experts of no rows, one row and many rows."""
    h, ffn = (2048, 768) if run.large else (512, 256)
    for counts in [(0, 0, 5, 1), (7, 0, 0, 9), (3, 40, 1, 0), (0, 0, 0, 1), (300, 1, 0, 211),
                   *[(4096,) * 8] * run.large]:
        ends = torch.tensor(counts).cumsum(0)
        dispatch = SimpleNamespace(ends=ends.tolist(), offsets=ends.to(run.device, torch.int32))
        x, w = run.normal(sum(counts), h), run.normal(len(counts), ffn, h, seed=1)
        gradient = run.normal(sum(counts), ffn, seed=2)
        for name, rows, weights in (("W", x, w), ("W^T", gradient, w.transpose(1, 2))):
            expected = [part.double() @ weight.double().t() for part, weight in zip(rows.split(counts), weights)]
            run.equal(f"experts {name} with {counts} rows", grouped_linear(rows, weights, dispatch),
                      torch.cat(expected), 2 * BF16)           # cuBLAS may also round the parts of a long sum
    run.speed(f"{counts} rows", lambda: grouped_linear(x, w, dispatch))


def attention(run: Run):
    """The attention that torch chooses, flash attention within documents, and their direct backward equal float64's."""
    most = min(32, run.free // 2**30)              # in float64 a head's scores and their gradients take almost 1 GiB
    causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    cases = [(partial(fused_attention, bias=None), causal, sizes) for sizes in (
        (2, 192, 8, 2, 64), (2, 320, 4, 1, 128), (2, 128, 4, 4, 64), *[(1, 4096, most, most, 128)] * run.large)]
    if has_flash_attention(run.device):
        ends = torch.rand(2, 128, generator=torch.Generator().manual_seed(1)) < 0.3
        numbers = F.pad(ends, (1, -1)).long().cumsum(1)         # many documents have one token
        mask = AttentionMask(torch.arange(128), document_begins(numbers), None, 128)
        bias = mask.bias(torch.float64, run.device)
        cases += [(partial(varlen_attention, runs=mask.runs(run.device)),
                   partial(F.scaled_dot_product_attention, attn_mask=bias, enable_gqa=True), sizes)
                  for sizes in ((2, 128, 4, 4, 64), (2, 128, 8, 2, 64))]
    for function, definition, (b, s, heads, groups, d) in cases:
        name = f"{function.func.__name__}, {heads}/{groups} heads of {d}, {s} tokens"
        q, k, v, gradient = (run.normal(b, s, n, d, seed=seed).transpose(1, 2)         # strided as training has them
                             for seed, n in enumerate((heads, groups, groups, heads)))
        output, segment = run_segment(function, q, k, v)
        inputs = [x.double().requires_grad_() for x in (q, k, v)]
        expected = definition(*inputs)
        for part, *pair in zip(("output", "gradient of q", "gradient of k", "gradient of v"),
                               (output, *segment.backward(gradient)),
                               (expected, *torch.autograd.grad(expected, inputs, gradient.double()))):
            run.equal(f"{name}: {part}", *pair, 4 * BF16)      # probabilities and their gradients are rounded, too
        run.speed(f"{name}: forward and backward", lambda function=function, inputs=(q, k, v), gradient=gradient:
                  run_segment(function, *inputs)[1].backward(gradient))
        backend = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        run.numbers[f"{name}: torch chooses"] = SDPBackend(backend).name
