"""Compile a run's kernels for GPUs that are not there.

    python tests/support/triton_kernels.py 80 90        # a line of JSON for each graph and compute capability

Triton's wheel brings its own compiler and NVIDIA's assembler, and neither needs a GPU. So three steps suffice:

    collect     a dry run (nanodomino/estimate) calls each function that the program hands to torch.compile, with
                tensors that have shapes but no numbers; torch.compile captures the graph
    generate    inductor turns the graph into the source of Triton kernels, as if its tensors were on a GPU
    assemble    Triton compiles the source, and ptxas says how many registers the kernel takes, and how many spill

It runs in a process of its own, because it makes torch believe in a GPU.
"""

import json
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from unittest import mock

import torch

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import train                                                    # noqa: E402
from nanodomino.estimate import rank as dry_run                 # noqa: E402
from nanodomino.estimate.accounts import Accounts               # noqa: E402
from nanodomino.settings.config import Config                   # noqa: E402
from support.harness import EXPERTS                             # noqa: E402

SHARED_MEMORY = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024}     # bytes that a thread block can have
SIZES = dict(num_layers=2, hidden_size=1024, num_attention_heads=16, seq_length=1024, global_batch_size=16,
             micro_batch_size=16, slices=2, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
LLAMA = dict(normalization="RMSNorm", swiglu=True, position_embedding_type="rope", num_query_groups=4,
             qk_layernorm=True, disable_bias_linear=True)
FAMILIES = {"gpt2": {}, "llama": LLAMA, "dropout": dict(hidden_dropout=0.1),
            "experts": EXPERTS | dict(moe_ffn_hidden_size=512), "recomputed": dict(recompute_granularity="full"),
            "tensorwise": dict(fp8_format="hybrid"), "rowwise": dict(fp8_format="hybrid", fp8_recipe="rowwise")}


# ---- collect

def name_of(function) -> str:
    """Return the name of a function, or of the function that a lambda or partial calls."""
    function = getattr(function, "func", function)
    return function.__name__ if function.__name__ != "<lambda>" else function.__code__.co_names[0]


def form_of(value):
    """Return what a graph depends on: shapes, strides and types of tensors, and all other values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(form_of, value)) if isinstance(value, tuple | list) else value


def graphs_of(config: Config):
    """Yield (name, graph, its inputs) for each graph that a training step compiles."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    calls, fuse = {}, Accounts.fuse

    def recording(accounts, function):
        kernel = fuse(accounts, function)

        def record(*args):
            if accounts.in_kernel is None:
                needs_grad = torch.is_grad_enabled()
                calls.setdefault((id(function), form_of(args)), (function, args, needs_grad))
            return kernel(*args)
        return record

    with mock.patch.object(Accounts, "fuse", recording):
        dry_run.dry_run(train, config)
    for function, args, needs_grad in calls.values():
        found = []

        def keep(graph, inputs, found=found):
            found.append((graph, inputs))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
        with torch.set_grad_enabled(needs_grad), functorch.patch(force_non_lazy_backward_lowering=True):
            torch.compile(function, backend=backend, dynamic=False)(*args)
        for (graph, inputs), suffix in zip(found, ("", "_gradient")):
            yield name_of(function) + suffix, graph, inputs


# ---- generate

@contextmanager
def gpu(capability: int):
    """Make torch and Triton believe in a GPU of this compute capability."""
    import torch._dynamo.device_interface as device_interface
    import torch.utils._triton as checks
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name="GPU", major=major, minor=minor, multi_processor_count=100, total_memory=2**35, warp_size=32,
        regs_per_multiprocessor=2**16, max_threads_per_multi_processor=1024 if capability < 80 else 2048,
        max_threads_per_block=1024, shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=SHARED_MEMORY[capability], L2_cache_size=2**25, gcnArchName="")
    here = dict(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, _lazy_init=lambda: None,
                get_device_properties=lambda device=None: properties, get_device_name=lambda device=None: "GPU",
                get_device_capability=lambda device=None: (major, minor), is_initialized=lambda: True,
                is_bf16_supported=lambda including_emulation=True: capability >= 80)
    interface = dict(is_available=lambda: True, current_device=lambda: 0, is_triton_capable=lambda device=None: True,
                     raise_if_triton_unavailable=lambda device=None: None,
                     get_device_properties=lambda device=None: properties,
                     get_compute_capability=lambda device=None: capability)
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_device=lambda: 0,
        is_active=lambda: True, get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda, utils=SimpleNamespace(get_device_properties=lambda device: dict(
            max_shared_mem=SHARED_MEMORY[capability], multiprocessor_count=100, warpSize=32))))
    for known in (DeviceProperties.create, *vars(checks).values()):           # what torch found out about another GPU
        if hasattr(known, "cache_clear"):
            known.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **here))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.multiple(device_interface.CudaInterface, **{
            name: staticmethod(function) for name, function in interface.items()}))
        yield


def sources_of(graph, inputs) -> tuple[int, list[tuple[str, str]]]:
    """Return how many kernels a graph launches, and (name, source) of each Triton kernel. inputs: meta tensors. A
    kernel can be launched more than once, and torch itself sorts, and adds up the rows of partial sums."""
    from torch._inductor import config as inductor
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    mode = FakeTensorMode()
    with mode:
        there = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
                 for value in inputs]
    with torch.no_grad():
        lowered = make_fx(graph, tracing_mode="fake")(*there)
    there = [node.meta["val"] for node in lowered.graph.nodes if node.op == "placeholder"]
    lowering = GraphLowering(lowered, example_inputs=there, shape_env=mode.shape_env)
    with (inductor.patch(deterministic=True), V.set_graph_handler(lowering), V.set_fake_mode(mode), DebugContext()):
        lowering.run(*there)
        code = lowering.codegen()[0]
    code = getattr(code, "value", code)
    assert "extern_kernels." not in code
    launches = re.findall(r"^ *triton_\w+\.run\(|^ *buf.*\.sum\(dim=0\)|^ *buf\d+ = torch\.ops\.", code, re.MULTILINE)
    kernels = re.findall(r"async_compile.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.DOTALL)
    return len(launches), kernels


# ---- assemble

def assemble(name: str, source: str, capability: int) -> dict:
    """Compile a kernel in all sizes that inductor would try. Return the most registers and spilled bytes of a thread,
    the most shared memory of a thread block, and the arguments that are not known to be divisible by 16."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    made, compile_kernel = [], triton.compile
    kernel = getattr(PyCodeCache.load(source), name)
    with mock.patch.object(triton, "compile", lambda *args, **options: made.append(compile_kernel(*args, **options))
                           or made[-1]):
        kernel.precompile(warm_cache_only=True)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    registers, spilled = [], []
    for one in made:
        with NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(one.asm["ptx"])
            file.flush()
            target = re.search(r"\.target (\w+)", one.asm["ptx"])[1]
            assert target.startswith(f"sm_{capability}"), target
            says = subprocess.run([ptxas, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"], text=True,
                                  capture_output=True, check=True).stderr
        registers.append(int(re.search(r"Used (\d+) registers", says)[1]))
        spilled.append(sum(map(int, re.findall(r"(\d+) bytes spill", says))))
    divisible = {index for indices in kernel.triton_meta["configs"][0] for index in indices}
    arguments = [one for one, kind in kernel.triton_meta["signature"].items() if kind != "constexpr"]
    return dict(registers=max(registers), spilled=max(spilled), shared=max(one.metadata.shared for one in made),
                odd=[one for index, one in enumerate(arguments) if index not in divisible])


def main(capabilities: list[int]):
    """Print a line for each graph and compute capability."""
    done, made = set(), {}
    for settings in FAMILIES.values():
        for dtype in ("bfloat16",) if "fp8_format" in settings else ("bfloat16", "float16", "float32"):
            config = Config(**SIZES | settings, dtype=dtype, device="cuda", compile=True)
            for function, graph, inputs in graphs_of(config.resolve(1).with_vocabulary(50257)):
                code = graph.code
                for capability in capabilities:
                    key = code, form_of(inputs), capability
                    if key in done or capability < (
                            90 if "fp8_format" in settings else 80 if dtype == "bfloat16" else 75):
                        continue
                    done.add(key)
                    with gpu(capability):
                        launches, sources = sources_of(graph, inputs)
                        for name, source in sources:
                            if source not in made:
                                made[source] = assemble(name, source, capability)
                    print(json.dumps(dict(function=function, dtype=dtype, capability=capability, launches=launches,
                                          kernels=[made[source] for _, source in sources])), flush=True)


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
