"""The checks of these tests fail where they should, and the machine code is read right."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.nvidia import machine_code
from bench.nvidia.compiler import IN_PLACE, array, compile_for
from jsg.engine.device import cards
from jsg.models.tensor_parallel import AXES

POOL = 1_000_000


def write(pool, index, new):
    return pool.at[index].set(new)


def test_a_pool_that_is_not_donated_is_not_aliased():
    args = array(POOL, 8), array(4, dtype="int32"), array(4, 8)
    assert compile_for("h200", write, *args, donate=(0,)).aliased_bytes == POOL * 16
    assert compile_for("h200", write, *args).aliased_bytes == 0


@pytest.mark.parametrize(
    ("fn", "maker"),
    [
        (lambda pool: jnp.sum(pool.astype(jnp.float32) ** 2), "convert"),
        (lambda pool: (write(pool, jnp.arange(4), 1), pool), "copy"),
        (lambda pool: jnp.roll(pool, 1, axis=0), "concatenate"),
    ],
)
def test_what_touches_all_of_a_pool_is_seen(fn, maker: str):
    program = compile_for("h200", fn, array(POOL, 8))
    assert maker in program.makers_of(POOL * 8) - IN_PLACE
    assert program.makers_of(POOL * 8 + 1) == set()


def test_a_kernel_that_is_written_anew_is_seen_and_one_that_is_converted_block_by_block_is_not():
    def product(x, kernel):
        return jnp.dot(x, kernel.astype("bfloat16"), preferred_element_type=jnp.float32)

    args = array(32, 1024), array(1024, 2048, dtype="int8")
    by_cublas, by_triton = (
        compile_for("h200", product, *args, options={"xla_gpu_enable_triton_gemm": is_on}) for is_on in (False, True)
    )
    assert [text.split("{")[0] for text in by_cublas.writers_of([(1024, 2048)])] == ["bf16[1024,2048]"]
    assert by_triton.writers_of([(1024, 2048)]) == []
    assert by_triton.writers_of([(32, 2048)]), "the product is written"


def test_a_loop_is_not_one_command_buffer():
    def chain(x, times):
        for _ in range(times):
            x = jnp.sin(jnp.cumsum(x @ x, axis=0))
        return x

    def loop(x):
        return jax.lax.fori_loop(0, 9, lambda _, x: chain(x, 4), x)

    assert compile_for("h200", lambda x: chain(x, 4), array(512, 512)).is_one_command_buffer
    program = compile_for("h200", loop, array(512, 512))
    assert not program.is_one_command_buffer
    assert any("kCommandBuffer" in name for launch in program.launches for name in launch.containers)


def test_launches_have_names_and_shared_memory():
    program = compile_for("h200", jax.nn.softmax, array(512, 4096))
    assert [launch.shared_bytes > 0 for launch in program.launches] == [True]
    assert program.kernel(program.launches[0].name) == program.launches[0]


def test_one_program_for_four_devices():
    sharding = jax.sharding.NamedSharding(cards.mesh_of("h200", 4), jax.sharding.PartitionSpec(AXES))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=sharding)
    program = compile_for("h200", lambda x: jnp.sum(x, axis=0), x, num_devices=4)
    assert " all-reduce" in program.hlo


@pytest.mark.parametrize("card", cards.CLASSES.values())
def test_instructions_are_those_of_the_machine_code(card: str, nvdisasm):
    program = compile_for(card, lambda x: jnp.exp2(x) * 3, array(1024, dtype="float32"))
    (kernel,) = program.launches
    counts = program.instructions(kernel.name, nvdisasm)
    assert counts["MUFU.EX2"] == 1
    assert counts["EXIT"] >= 1


def test_a_kernel_of_which_nothing_is_read_is_an_error(nvdisasm):
    program = compile_for("h200", lambda x: x + 1, array(8))
    with pytest.raises(ValueError, match="must have a kernel no_such"):
        program.instructions("no_such", nvdisasm)
    with pytest.raises(ValueError, match="must have instructions"):
        machine_code.count('\t.section .text.other,"ax"\n /*0000*/ EXIT ;', ".text.kernel")


def test_instructions_of_a_section_that_names_its_registers():
    listing = """
        .section .text.kernel,"ax",@progbits
        .sectionflags @"SHF_BARRIERS=1"
        .sectioninfo @"SHI_REGISTERS=12"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/              @!P0 EXIT ;
        .section .text.next,"ax",@progbits
        /*0000*/                   EXIT ;
    """
    assert machine_code.count(listing, ".text.kernel") == {"IMAD.MOV.U32": 1, "EXIT": 1}


def test_records_that_are_not_compressed():
    """JAX 0.12 writes them so."""
    records = [b"first", b"the second"]
    data = b"\0" + bytes([len(records)]) + bytes(map(len, records)) + b"".join(records)
    header = struct.pack("<8xQ8xcI3x8x", len(data), b"r", len(records))
    block = machine_code.RIEGELI_SIGNATURE.ljust(machine_code.RIEGELI_BLOCK_HEADER, b"\0")
    assert list(machine_code._riegeli_records(block + header + data)) == records


def test_every_card_is_described_by_where_its_figures_are_from():
    for name in cards.NAMES:
        assert "\n# Provenance: " in cards.TARGETS.joinpath(f"{name}.txtpb").read_text(encoding="utf-8")
    shared = {name: cards.card(name).shared_bytes for name in cards.NAMES}
    assert shared["a100_80gb"] == 166_912 and shared["h200"] == 232_448 and min(shared.values()) == shared["l4"]
    assert cards.card("l40s").capability == (8, 9) and cards.card("h200").capability == (9, 0)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"\x05\x10hello", b"hello"),
        (b"\x0a\x10hello\x05\x05", b"hellohello"),  # a copy of 5 bytes, 5 back
        (b"\x09\x00a\x11\x01", b"a" * 9),  # a copy that overlaps what it writes
        (b"\x09\x00a\x1e\x01\x00", b"a" * 9),
        (b"\x46\xf0\x45" + bytes(range(70)), bytes(range(70))),  # a literal whose length stands in a byte of its own
    ],
)
def test_snappy(stream, expected):
    assert machine_code._snappy(stream, 0) == expected


def test_numbers_of_several_bytes():
    assert machine_code.varint(np.array([0xAC, 0x02], np.uint8).tobytes(), 0) == (300, 2)
