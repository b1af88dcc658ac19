"""Loading and launching: the calls made, on a driver that only writes them down; and, with a GPU, the real one."""

from __future__ import annotations

import ctypes
import enum
import threading
from types import SimpleNamespace

import pytest
import torch
from jit_sources import VECTOR_ADD, spilling, vector_add

from flashlane import jit
from flashlane.core.problem import arch_of
from flashlane.jit import driver, launch

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Params(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("n", ctypes.c_longlong),
    )


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


ATTRIBUTES = {
    driver.NUM_REGS: 40,
    driver.LOCAL_SIZE_BYTES: 0,
    driver.SHARED_SIZE_BYTES: 1024,
    driver.MAX_THREADS_PER_BLOCK: 256,
}
"""Of functions of the fake device."""


NO_CONTEXT = 0


class FakeDriver:
    """Two devices whose contexts are 100 and 101; every call is written down."""

    def __init__(self) -> None:
        self.contexts = [100]
        self.calls: list[tuple] = []
        self.failing: dict[str, Code] = {}
        self.params: list[bytes] = []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if name in self.failing:
                return (self.failing[name], None)
            if name.startswith("cuLaunchKernel") and self.contexts[-1] == NO_CONTEXT:
                return (Code.CUDA_ERROR_INVALID_CONTEXT,)
            answer = 7
            if hasattr(self, f"do_{name}"):
                answer = getattr(self, f"do_{name}")(*arguments)
            return (Code.CUDA_SUCCESS,) if answer is None else (Code.CUDA_SUCCESS, answer)

        return call

    def do_cuDeviceGet(self, index):
        return index

    def do_cuDevicePrimaryCtxRetain(self, index):
        return 100 + index

    def do_cuCtxPushCurrent(self, context):
        self.contexts.append(context)

    def do_cuCtxPopCurrent(self):
        return self.contexts.pop()

    def do_cuFuncGetAttribute(self, attribute, function):
        return ATTRIBUTES[attribute]

    def do_cuDeviceGetAttribute(self, attribute, device):
        assert attribute == driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        return 166912

    def do_cuFuncSetAttribute(self, *_):
        return None

    def do_cuGetErrorName(self, code):
        return code.name.encode()

    def do_cuGetErrorString(self, code):
        return b"what the driver says"

    def do_cuLaunchKernel(self, *arguments):
        address = ctypes.c_void_p.from_address(arguments[-2]).value
        self.params.append(ctypes.string_at(address, ctypes.sizeof(Params)))
        self.launched_in = self.contexts[-1]

    def launcher(self, function, grid, block, shared, address, overlapped):
        return lambda stream: self.cuLaunchKernel(function, *grid, *block, shared, stream, address, overlapped)[0]

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def fake(monkeypatch):
    found = FakeDriver()
    monkeypatch.setattr(launch, "driver", lambda: found)
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: 1000 + device)
    monkeypatch.setattr(launch, "device_getter", lambda: lambda: 0)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "_libraries", {})
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for cached in (launch._primary_context, launch._shared_opt_in):
        cached.cache_clear()
    yield found
    for cached in (launch._primary_context, launch._shared_opt_in):
        cached.cache_clear()


def on_fake(fake, device: int = 0) -> jit.Function:
    return jit.load(jit.compile(vector_add(), "sm_80"), device)


def test_loads_once_a_device_and_reads_attributes(fake):
    function = on_fake(fake)
    assert on_fake(fake) is function and on_fake(fake, 1) is not function
    numbers = (function.registers, function.local_bytes, function.static_shared, function.max_threads)
    assert numbers == (40, 0, 1024, 256)
    assert len(fake.named("cuLibraryLoadData")) == 1  # a library serves every device
    assert len(fake.named("cuKernelGetFunction")) == len(fake.named("cuFuncLoad")) == 2
    assert fake.contexts == [100]


def test_launch_passes_everything_on(fake):
    params = Params(1, 2, 3, 2**40)
    on_fake(fake).launch((5, 6, 7), (64, 2, 2), 512, params)
    on_fake(fake).launch((1, 1, 1), (32, 1, 1), 0, params, stream=77)
    first, second = fake.named("cuLaunchKernel")
    assert first[1:9] == (5, 6, 7, 64, 2, 2, 512, 1000) and second[8] == 77
    assert fake.params == [bytes(params)] * 2


def test_a_launch_that_overlaps_the_one_before_it(fake):
    params = Params(1, 2, 3, 2**40)
    enqueue = on_fake(fake).prepare((5, 6, 7), (32, 4, 2), 512, params, overlapped=True)
    for stream in (77, 78):
        enqueue(stream)
    fake.contexts = [NO_CONTEXT]
    on_fake(fake).launch((1, 1, 1), (32, 1, 1), 0, params, overlapped=True)  # in a thread that has not used CUDA
    assert fake.params == [bytes(params)] * 3 and fake.launched_in == 100
    *first, refused, again = fake.named("cuLaunchKernel")
    assert [call[1:9] for call in first] == [(5, 6, 7, 32, 4, 2, 512, stream) for stream in (77, 78)]
    assert refused[8] == again[8] == 1000 and all(call[-1] for call in (*first, refused, again))


def test_launch_with_a_parameter_each(fake):
    values = [ctypes.c_longlong(11), ctypes.c_int(12)]
    seen = []
    fake.do_cuLaunchKernel = lambda *arguments: seen.extend((ctypes.c_void_p * 2).from_address(arguments[-2]))
    on_fake(fake).launch((1, 1, 1), (32, 1, 1), 0, values)
    assert seen == [ctypes.addressof(value) for value in values]


def test_launch_on_another_device_than_the_current(fake):
    on_fake(fake, 1).launch((1, 1, 1), (32, 1, 1), 0, Params())
    assert fake.launched_in == 101 and fake.contexts == [100]
    assert fake.named("cuLaunchKernel")[0][8] == 1001


def test_launch_in_a_thread_that_has_not_used_cuda(fake):
    function = on_fake(fake)
    fake.contexts = [NO_CONTEXT]
    function.launch((1, 1, 1), (32, 1, 1), 0, Params(1, 2, 3, 4))
    assert fake.launched_in == 100 and fake.contexts == [NO_CONTEXT] and len(fake.params) == 1
    fake.failing["cuLaunchKernel"] = Code.CUDA_ERROR_INVALID_CONTEXT  # in the function's own context too
    with pytest.raises(jit.LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        function.launch((1, 1, 1), (32, 1, 1), 0, Params())
    assert fake.contexts == [NO_CONTEXT]


def test_a_prepared_launch_takes_what_the_parameters_hold_then(fake):
    function, params = on_fake(fake), Params(1, 2, 3, 4)
    enqueue = function.prepare((5, 6, 7), (64, 2, 2), 60_000, params)
    before = bytes(params)
    enqueue(77)
    params.a = 2**40
    enqueue(78)
    assert fake.params == [before, bytes(params)] and before != bytes(params)
    assert [call[1:9] for call in fake.named("cuLaunchKernel")] == [(5, 6, 7, 64, 2, 2, 60_000, s) for s in (77, 78)]
    assert [call[2] for call in fake.named("cuFuncSetAttribute")] == [60_000]
    fake.failing["cuLaunchKernel"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(jit.LaunchError, match=r"tests/add.cu .*\(5, 6, 7\).*60000 bytes.*CUDA_ERROR_INVALID_VALUE"):
        enqueue(77)
    with pytest.raises(ValueError, match="its x may be"):
        function.prepare((0, 1, 1), (32, 1, 1), 0, params)


def test_a_prepared_launch_keeps_its_parameters(fake):
    enqueue = on_fake(fake).prepare((1, 1, 1), (32, 1, 1), 0, Params(1, 2, 3, 4))
    others = [Params(9, 9, 9, 9) for _ in range(100)]  # what freed memory would be taken for
    enqueue(77)
    assert fake.params == [bytes(Params(1, 2, 3, 4))] and len(others) == 100


def test_static_shared_memory_counts_where_none_is_opted_in_to(fake):
    function = on_fake(fake)
    function.launch((1, 1, 1), (32, 1, 1), 47 * 1024, Params())
    assert not fake.named("cuFuncSetAttribute"), "with the kernel's own 1024 bytes these are 48 KiB"
    function.launch((1, 1, 1), (32, 1, 1), 47 * 1024 + 1, Params())
    assert [call[2] for call in fake.named("cuFuncSetAttribute")] == [47 * 1024 + 1]


def test_shared_memory_is_opted_in_to_once(fake):
    function = on_fake(fake)
    for shared in (47 * 1024, 60_000, 50_000, 60_000):
        function.launch((1, 1, 1), (32, 1, 1), shared, Params())
    assert [call[2] for call in fake.named("cuFuncSetAttribute")] == [60_000]
    with pytest.raises(ValueError, match=r"shared is 165889 bytes for tests/add.cu; device 0 .* 165888 .* 1024 static"):
        function.launch((1, 1, 1), (32, 1, 1), 165_889, Params())
    assert len(fake.named("cuLaunchKernel")) == 4


@pytest.mark.parametrize(
    "grid, block, words",
    [
        ((0, 1, 1), (32, 1, 1), "its x may be 1 to 2147483647"),
        ((2**31, 1, 1), (32, 1, 1), "its x may be"),
        ((1, 65536, 1), (32, 1, 1), "its y may be 1 to 65535"),
        ((1, 1, 65536), (32, 1, 1), "its z may be 1 to 65535"),
        ((1, 1, 1), (257, 1, 1), "1 to 256 threads"),
        ((1, 1, 1), (32, 0, 1), "1 to 256 threads"),
    ],
)
def test_grids_and_blocks_that_cannot_be(fake, grid, block, words):
    with pytest.raises(ValueError, match=rf"tests/add.cu; .*{words}"):
        on_fake(fake).launch(grid, block, 0, Params())
    assert not fake.named("cuLaunchKernel")


def test_a_refused_launch_names_everything(fake):
    function = on_fake(fake, 1)
    fake.failing["cuLaunchKernel"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(jit.LaunchError) as caught:
        function.launch((5, 6, 7), (64, 2, 2), 512, Params())
    for words in ("tests/add.cu", "sm_80", "(5, 6, 7)", "(64, 2, 2)", "512 bytes", "CUDA_ERROR_INVALID_VALUE", "says"):
        assert words in str(caught.value)
    assert fake.contexts == [100]


def test_a_refused_load_is_not_remembered(fake):
    fake.failing["cuKernelGetFunction"] = Code.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(jit.LaunchError, match=r"tests/add.cu \(sm_80, device 0\).*NO_BINARY_FOR_GPU"):
        on_fake(fake)
    assert fake.contexts == [100]
    fake.failing.clear()
    assert on_fake(fake).registers == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_loading_says_so():
    driver.driver.cache_clear()
    with pytest.raises(jit.ToolchainError, match="needs an NVIDIA"):
        jit.load(jit.compile(vector_add("no gpu"), "sm_80"), 0)


# From here on: a GPU.


def loaded(source: jit.KernelSource | None = None, device: int = 0) -> jit.Function:
    arch = arch_of(torch.device("cuda", device))
    return jit.load(jit.compile(source or vector_add(), arch), device)


def inputs(n: int = 10_007, device: int = 0) -> tuple[torch.Tensor, ...]:
    a, b = (torch.randn(n, device=f"cuda:{device}") for _ in range(2))
    return a, b, torch.full_like(a, float("nan"))


def add(function: jit.Function, tensors: tuple[torch.Tensor, ...], stream: int | None = None) -> None:
    n = tensors[0].numel()
    params = Params(*(tensor.data_ptr() for tensor in tensors), n)
    function.launch((-(-n // 256), 1, 1), (256, 1, 1), 0, params, stream)


@gpu
@needs_gpu
def test_gpu_adds_on_the_current_stream():
    function = loaded()
    side = torch.cuda.Stream()
    a, b, c = inputs(1 << 22)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms: on any other stream the sum would be taken too early
        a.mul_(3)
        add(function, (a, b, c))
        c.mul_(2)
    side.synchronize()
    torch.testing.assert_close(c, 2 * (a + b), rtol=0, atol=0)


@gpu
@needs_gpu
def test_gpu_adds_in_a_graph():
    function = loaded(vector_add("graph"))
    a, b, c = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first launch of this kernel is the captured one
        add(function, (a, b, c))
    assert c.isnan().all()
    for _ in range(2):
        a.normal_()
        graph.replay()
        torch.testing.assert_close(c, a + b, rtol=0, atol=0)


@gpu
@needs_gpu
def test_gpu_adds_in_a_thread_that_has_not_used_cuda():
    function = loaded()
    tensors = inputs()
    stream = torch.cuda.current_stream().cuda_stream
    worker = threading.Thread(target=add, args=(function, tensors, stream))
    worker.start()
    worker.join()
    torch.testing.assert_close(tensors[2], tensors[0] + tensors[1], rtol=0, atol=0)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_adds_on_the_second_device():
    function = loaded(device=1)
    tensors = inputs(device=1)
    with torch.cuda.device(0):
        add(function, tensors)
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(tensors[2], tensors[0] + tensors[1], rtol=0, atol=0)


@gpu
@needs_gpu
def test_gpu_shared_memory():
    text = """
    struct Params { const float* a; const float* b; float* c; long long n; };
    extern "C" __global__ void k(Params p) {
      extern __shared__ float tile[];
      for (int i = threadIdx.x; i < p.n; i += blockDim.x) tile[i] = p.a[i];
      __syncthreads();
      for (int i = threadIdx.x; i < p.n; i += blockDim.x) p.c[i] = tile[p.n - 1 - i];
    }"""
    function = loaded(jit.KernelSource("tests/reverse.cu", text, "k"))
    most = jit.shared_limit(arch_of(torch.device("cuda", 0)))
    a, b, c = inputs(most // 4)
    function.launch((1, 1, 1), (256, 1, 1), most, Params(a.data_ptr(), b.data_ptr(), c.data_ptr(), most // 4))
    torch.testing.assert_close(c, a.flip(0), rtol=0, atol=0)
    with pytest.raises(ValueError, match=rf"shared is {most + 1} bytes for tests/reverse.cu; .* at most {most} "):
        function.launch((1, 1, 1), (256, 1, 1), most + 1, Params())


@gpu
@needs_gpu
def test_gpu_occupancy_agrees_with_the_driver():
    for source in (vector_add(), spilling()):
        function = loaded(source)
        compiled = jit.compile(source, function.arch)
        assert function.registers == compiled.report.registers
        assert (function.local_bytes > 0) == (compiled.report.stack > 0)
        most = min(jit.shared_limit(function.arch), 227 * 1024)
        for threads in (32, 96, 128, 384, 1024):
            for shared in (0, 1000, 20_000, 60_000, most // 2, most):
                ours = jit.occupancy(function.arch, threads, function.registers, shared + function.static_shared)
                assert ours.ctas == function.occupancy(threads, shared), (threads, shared)


@gpu
@needs_gpu
def test_gpu_wrong_architecture_is_named():
    other = "sm_80" if arch_of(torch.device("cuda", 0)) != "sm_80" else "sm_90a"
    source = jit.KernelSource("tests/wrong.cu", VECTOR_ADD, "add")
    with pytest.raises(jit.LaunchError, match=rf"tests/wrong.cu \({other}"):
        jit.load(jit.compile(source, other), 0)


@pytest.mark.parametrize("private", [True, False])
def test_a_stream_is_got_and_set_by_whichever_functions_torch_has(monkeypatch, private):
    """The same object for the same stream, where torch's private functions are there."""
    made, given = [], []
    stream = SimpleNamespace(stream_id=3, device_index=0, device_type=1)
    monkeypatch.setattr(launch, "_streams", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.append(device) or stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: given.append(one.stream_id))
    if private:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (3, index, 1), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **name: given.append(name["stream_id"]), raising=False)
    else:
        for name in ("_cuda_getCurrentStream", "_cuda_setStream"):
            monkeypatch.delattr(torch._C, name, raising=False)
    device = torch.device("cuda", 0)
    assert launch.current_stream(device) is launch.current_stream(device) is stream
    assert made == [device] * (1 if private else 2)
    set_stream = launch.stream_setter(stream)
    set_stream(), set_stream()
    assert given == [3, 3]


def test_the_stream_of_a_device_without_an_index_is_that_of_the_current_one(monkeypatch):
    monkeypatch.setattr(launch, "_streams", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    name_of = {-1: (5, 1, 1), 0: (5, 0, 1), 1: (5, 1, 1)}  # device 1 is the current one
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", name_of.get, raising=False)
    current, first, second = (launch.current_stream(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1"))
    assert current is second is not first


@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 3), (2, 0, 3), (0, 4, 0, 8), (4, 1, 1)])
def test_packed_strides_are_torchs(shape):
    assert launch.packed(shape) == torch.empty(shape).stride()
