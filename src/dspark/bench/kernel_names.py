"""Names of kernels for people: what the framework compiled for an operation is named by the operation."""

import re

_NATIVE = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(\w+)")
# Layers around an operation that say how it is launched, not what it does.
_WRAPPERS = re.compile(
    r"(.*elementwise_kernel.*|gpu_kernel.*|gpu_index_kernel|memory|policies|TrivialOffset\w*|OpaqueType|ReduceOp|"
    r"func_wrapper_t|.*launch.*|templates|detail|cuda|opmath\w*|BUnaryFunctor|AUnaryFunctor|BinaryFunctor|reduce_kernel)"
)
_SUFFIXES = re.compile(r"(_kernel)?(_cuda|_impl)*$")
_LIBRARY = re.compile(r"(gemm|nvjet|cutlass|splitKreduce|gemv)", re.IGNORECASE)
_LONGEST = 56


def readable_name(key: str) -> str:
    """The operation in a kernel's full name; kernels of one operation have one name.

    Example: "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)..." is
    "torch direct_copy".
    """
    found = [name for name in _NATIVE.findall(key) if not _WRAPPERS.fullmatch(name)]
    if found:
        return f"torch {_SUFFIXES.sub('', found[0])}"
    if "at::native" in key:
        outer = _NATIVE.findall(key)
        return f"torch {_SUFFIXES.sub('', outer[-1] if outer else key[:_LONGEST])}"
    if _LIBRARY.search(key):
        return "library product"
    return key.removeprefix("void ").partition("(")[0].partition("<")[0][:_LONGEST]
