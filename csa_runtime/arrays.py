# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as pointers, shapes and strides, importing none of the libraries.

Read in this order: torch tensors by their own methods (never exported: an export costs more than
a launch), NumPy arrays, DLPack, `__cuda_array_interface__`. DLPack comes before the interface
because its exporter orders the streams; the interface only names one.
"""

# Annotations are not postponed: NamedTuple would compile each, which takes longer than the rest.
import functools
import operator
import sys
from typing import Any, NamedTuple

_TORCH_DTYPES: dict[Any, str] = {}
_TORCH_DEVICES: dict[Any, tuple[str, int]] = {}
_new: Any = tuple.__new__
# np.dtype(ml_dtypes.bfloat16).str is "<V2": the interfaces have no code of their own for it.
_TYPESTR = {
    "f2": "float16", "f4": "float32", "f8": "float64", "V2": "bfloat16", "b1": "bool8",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}  # fmt: skip
ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
# What exporters raise for an array that they cannot share.
_EXPORT_ERRORS = (AttributeError, BufferError, NotImplementedError, TypeError)


class Array(NamedTuple):
    """One array, by value; `owner` keeps its memory alive.

    Attributes:
        name: the argument's name, for messages.
        pointer: address of the first element.
        shape: extents.
        strides: in elements.
        dtype: such as "bfloat16".
        device: "cpu" or "cuda".
        ordinal: of the CUDA device; -1 where the interface does not tell.
        library: top-level package of the array's type.
        writable: whether results may be written into it.
        stream: the stream its interface names, if any.
        owner: the object, or its DLPack capsule.
    """

    name: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    ordinal: int
    library: str
    writable: bool
    stream: int | None
    owner: Any

    @property
    def place(self) -> str:
        """The device in words."""
        return "the CPU" if self.device == "cpu" else f"cuda:{self.ordinal}"


def library_of(array: Any) -> str:
    """Top-level package of the array's type; "torch" for subclasses of its tensor too."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    name = type(array).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def describe(name: str, array: Any, stream: int = 0) -> Array:
    """Describe one array.

    Args:
        name: the argument's name, for messages.
        array: a torch tensor, a NumPy array, or anything with DLPack or
            `__cuda_array_interface__`.
        stream: handle of the CUDA stream that will use it, if it is on a GPU: an exporter makes it
            wait for what is pending; -1: nothing waits.

    Raises:
        ValueError: not an array, on a device that is neither CPU nor CUDA, or without the memory
            of its elements.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(name, array)
    described = _from_others(name, array, stream)
    if not described.pointer and 0 not in described.shape:
        raise _no_memory(name, described.shape)
    return described


def _from_others(name: str, array: Any, stream: int) -> Array:
    if hasattr(array, "__array_interface__") and not hasattr(array, "__cuda_array_interface__"):
        refuse_masked(name, array)  # its interface does not tell
        return _from_interface(name, array, array.__array_interface__, "cpu")
    # jax and cupy have both; on the CPU jax's __cuda_array_interface__ raises.
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(name, array, stream)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(name, array, interface, "cuda")
    raise ValueError(
        f"{name} is a {type(array).__module__}.{type(array).__qualname__}; a torch tensor, a NumPy "
        "array, or an object with __dlpack__ or __cuda_array_interface__ is allowed"
    )


def _from_torch(name: str, tensor: Any) -> Array:
    # Written for speed: it runs for each array of each call.
    device, ordinal = _TORCH_DEVICES.get(tensor.device) or _learn_device(name, tensor.device)
    dtype = _TORCH_DTYPES.get(tensor.dtype) or _learn_dtype(tensor.dtype)
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:
        raise ValueError(
            f"{name} has layout {tensor.layout} and no memory to read; a strided (dense) tensor "
            "with storage is allowed"
        ) from error
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a view of another tensor's negative, whose memory holds the opposite "
            "values; a tensor in memory of its own is allowed: pass its .resolve_neg()"
        )
    shape, strides = tuple(tensor.shape), tensor.stride()
    # Where the storage was freed, a view's address is its offset alone.
    if pointer == tensor.storage_offset() * tensor.element_size() and 0 not in shape:
        raise _no_memory(name, shape)
    # The generated constructor costs twice as much.
    array: Array = _new(
        Array,
        (name, pointer, shape, strides, dtype, device, ordinal, "torch", True, None, tensor),
    )
    return array


def _learn_device(name: str, device: Any) -> tuple[str, int]:
    """Remember type and ordinal of torch's device."""
    if device.type not in ("cpu", "cuda"):
        raise _bad_device(name, str(device))
    place = device.type, device.index if device.type == "cuda" else -1
    _TORCH_DEVICES[device] = place
    return place


def _learn_dtype(dtype: Any) -> str:
    """Remember the plain name of torch's dtype."""
    return _TORCH_DTYPES.setdefault(dtype, str(dtype).partition(".")[2])


def _from_dlpack(name: str, array: Any, stream: int) -> Array:
    from csa_runtime import dlpack  # ctypes: milliseconds that only its users should pay

    try:
        device_type = int(array.__dlpack_device__()[0])
    except _EXPORT_ERRORS as error:
        raise _no_export(name, error) from error
    on_cpu = device_type in (dlpack.CPU, dlpack.CUDA_HOST)
    if not on_cpu and device_type not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise _bad_device(name, f"DLPack device type {device_type}")
    try:
        view = dlpack.export(array, None if on_cpu else stream)
    except _EXPORT_ERRORS as error:
        raise _no_export(name, error) from error
    if view.device_type != device_type:
        raise ValueError(
            f"{name} is on DLPack device type {view.device_type} and its __dlpack_device__ says "
            f"{device_type}; the same from both is allowed: mend the exporter"
        )
    library = library_of(array)
    return Array(
        name,
        view.pointer,
        view.shape,
        view.strides,
        view.dtype,
        "cpu" if on_cpu else "cuda",
        -1 if on_cpu else view.ordinal,
        library,
        # jax arrays are values: others may share the buffer, whatever the capsule's flags say.
        not view.read_only and library != "jax",
        None,
        view.capsule,
    )


def _from_interface(name: str, array: Any, interface: Any, device: str) -> Array:
    try:
        shape, typestr = tuple(map(operator.index, interface["shape"])), interface["typestr"]
        pointer, read_only = interface["data"]
        pointer = operator.index(pointer or 0)
        dtype = _TYPESTR.get(typestr[1:])
        strides = interface.get("strides")
        strides = None if strides is None else tuple(map(operator.index, strides))
        mask, stream, fields = (interface.get(key) for key in ("mask", "stream", "descr"))
        stream = None if stream is None else operator.index(stream)
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"{len(shape)} extents, {len(strides)} strides")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} has an array interface that cannot be read ({error!r}); a dict with shape, "
            "typestr and data (address, read-only) is allowed: mend it, or pass another array"
        ) from error
    if dtype is None or (typestr[0] == ">" and not typestr.endswith("1")):
        raise ValueError(f"{name} has the element type {typestr!r}, which no operation here takes")
    if dtype == "bfloat16" and _void(array, fields, device):
        raise ValueError(
            f"{name} has the element type {fields or typestr!r}; bfloat16 is allowed: convert it, "
            "or view it as ml_dtypes.bfloat16"
        )
    if mask is not None:
        raise _masked(name)
    # bool and the like have no entry in ITEMSIZE, and no use here beyond an error message.
    itemsize = int(typestr[2:])
    if strides is None:
        in_elements = contiguous_strides(shape)
    elif any(step % itemsize for step in strides):
        raise ValueError(f"{name} has strides {strides} bytes, not multiples of its {itemsize}")
    else:
        in_elements = tuple(step // itemsize for step in strides)
    return Array(
        name,
        pointer,
        shape,
        in_elements,
        dtype,
        device,
        -1 if device == "cpu" else _ordinal(array),
        library_of(array),
        not read_only,
        stream,
        array,
    )


def _void(array: Any, fields: Any, device: str) -> bool:
    """Whether two bytes of void are no bf16: a structure, or NumPy's plain void."""
    if device == "cpu" and hasattr(array, "dtype"):
        return str(array.dtype) != "bfloat16"
    return fields is not None and (len(fields) != 1 or fields[0][0] != "")


def refuse_masked(name: str, array: Any) -> None:
    """Check that an array is none of NumPy's masked ones."""
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise _masked(name)


def _masked(name: str) -> ValueError:
    return ValueError(f"{name} is masked; an array without a mask is allowed: pass its .filled()")


def _no_export(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"{name} cannot be exported through DLPack ({type(error).__name__}: {error}); an array "
        "that can is allowed: convert it, or make a copy"
    )


def _ordinal(array: Any) -> int:
    """Device of an array behind `__cuda_array_interface__`, which has no field for it."""
    if library_of(array) in ("numba", "numba_cuda"):
        context = getattr(getattr(array, "gpu_data", None), "context", None)
        return int(getattr(getattr(context, "device", None), "id", -1))
    device = getattr(getattr(array, "device", None), "id", None)
    return device if isinstance(device, int) else -1


def _no_memory(name: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{name} has shape {shape} and no memory (its address is NULL); an array that holds its "
        "elements is allowed: pass one whose storage was not freed"
    )


def _bad_device(name: str, given: str) -> ValueError:
    return ValueError(f"{name} is on {given}; a CUDA device, or the CPU for all arrays, is allowed")


@functools.lru_cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
