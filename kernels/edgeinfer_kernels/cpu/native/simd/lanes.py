"""Vectors of sixteen lanes as numba values: how kernels reach the processor's own instructions.

A kernel is written once against the operations of this and the modules beside it (`scalars`,
`float_lanes`, `byte_lanes`). Nearly all of them are plain LLVM vector operations, which LLVM lowers to
whatever the target has (one 512-bit instruction, two of 256 bits, four of 128). Only four kinds depend on
the instruction set: the byte dot products (`dots`), the byte table lookup, the half-precision conversions,
and tiles (`tiles`). They are calls until the build gives them the bodies of its target (`emit_bodies`), so
that numba's part of a build is the same for all targets.
Addresses are int64; loads and stores need no alignment.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16

Emitter = Callable[..., Any]


class LaneVector(types.Type):
    """The numba type of a SIMD register of `count` elements."""

    def __init__(self, element: ir.Type, count: int, name: str) -> None:
        self.llvm_type = ir.VectorType(element, count)
        super().__init__(name=name)


@register_model(LaneVector)
class LaneVectorModel(models.PrimitiveModel):
    """A lane vector is passed as the LLVM vector itself."""

    def __init__(self, manager: Any, vector: LaneVector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


bytes64 = LaneVector(I8, 64, "bytes64")  # sixteen lanes of four bytes
int16x = LaneVector(I32, 16, "int16x")  # sixteen int32
float16x = LaneVector(F32, 16, "float16x")  # sixteen float32
address = types.int64


@dataclass(frozen=True)
class TargetOperation:
    """An operation that depends on the target: an LLVM function whose body `emitter` writes for a target's
    features.
    """

    emitter: Emitter
    function_type: ir.FunctionType

    def emit_body(self, function: ir.Function, features: str) -> None:
        """Fill in the function, for LLVM to inline wherever it is called."""
        function.attributes.add("alwaysinline")
        builder = ir.IRBuilder(function.append_basic_block())
        value = self.emitter(features, builder, *function.args)
        if self.function_type.return_type == ir.VoidType():
            builder.ret_void()
        else:
            builder.ret(value)


target_operations: dict[str, TargetOperation] = {}
"""LLVM name -> operation, of all that are defined."""


def _call_of_target_operation(emitter: Emitter, result: Any, arguments: tuple[Any, ...]) -> Emitter:
    """An emitter of a call to an operation that depends on the target, which is noted."""
    of_result = ir.VoidType() if result is types.void else llvm_type(result)
    function_type = ir.FunctionType(of_result, [llvm_type(argument) for argument in arguments])
    name = f"target_{emitter.__name__}_{len(target_operations)}"
    target_operations[name] = TargetOperation(emitter, function_type)
    return lambda builder, *values: call(builder, name, of_result, list(values))


def llvm_type(of: Any) -> ir.Type:
    """What numba passes for a type of an operation."""
    if isinstance(of, LaneVector):
        return of.llvm_type
    return {types.int32: I32, types.int64: I64, types.float32: F32}[of]


def emit_bodies(names: Iterable[str], features: str) -> ir.Module:
    """The operations of these LLVM names for a target's features, `+avx2,+fma,…`."""
    module = ir.Module("edgeinfer_target")
    for name in names:
        wanted = target_operations[name]
        wanted.emit_body(ir.Function(module, wanted.function_type, name), features)
    return module


def operation(result: Any, arguments: tuple[Any, ...]) -> Callable[[Emitter], Any]:
    """Make a numba intrinsic of fixed types from an emitter of LLVM instructions.

    The emitter gets (builder, *LLVM values); one whose first parameter is named `features` gets the target's
    feature string before them.
    """

    def decorate(emitter: Emitter) -> Any:
        wants_features = emitter.__code__.co_varnames[0] == "features"
        emit = _call_of_target_operation(emitter, result, arguments) if wants_features else emitter

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emitted = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else emitted

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope = {"signature": result(*arguments), "codegen": codegen}
        exec(f"def {emitter.__name__}(typing_context, {names}):\n    return signature, codegen\n", scope)
        return intrinsic(scope[emitter.__name__])

    return decorate


def constant_lanes(element: ir.Type, count: int, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, count), [value] * count)


def splat(builder: Any, scalar: Any, count: int) -> Any:
    vector_type = ir.VectorType(scalar.type, count)
    undefined = ir.Constant(vector_type, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, constant_lanes(I32, count, 0))


def load(builder: Any, at: Any, of_type: ir.Type) -> Any:
    value = builder.load(builder.inttoptr(at, of_type.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, at: Any) -> None:
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def call(builder: Any, name: str, result: ir.Type, values: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def part(builder: Any, vector: Any, index: int, parts: int) -> Any:
    """The index-th of `parts` equal parts of a vector."""
    size = vector.type.count // parts
    mask = ir.Constant(ir.VectorType(I32, size), list(range(index * size, (index + 1) * size)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def join(builder: Any, parts: list[Any]) -> Any:
    """Concatenate vectors of one size; their number is a power of two."""
    while len(parts) > 1:
        size = parts[0].type.count * 2
        mask = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        parts = [builder.shuffle_vector(parts[i], parts[i + 1], mask) for i in range(0, len(parts), 2)]
    return parts[0]


def as_words(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.VectorType(I32, 16))


def as_bytes(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.VectorType(I8, 64))
