"""`apply(..., mesh=)`: real processes that split the tokens of a real FLUX class among them."""

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import command_line as cli
from tests.cats import lively_model
from tests.split_models import (
    GRID,
    HEADS,
    METHODS,
    Counted,
    Ran,
    blocks_as_on_a_gpu,
    cached,
    command,
    disagreeing,
    gradients,
    gradients_in_large_blocks,
    loop,
    refused,
    run,
    run_in_large_blocks,
    run_kind,
    started_and_lost,
    started_by_torchrun,
    summarised,
    summarised_by_one,
)
from tests.tiles import paper
from tests.worlds import CONTEXT, Failed, World, world_of

from nearfield import Geometry, Hilbert, Merge
from nearfield.methods import Composition
from nearfield.parallel.cuts import even_split, split_between_regions
from nearfield.parallel.far import SplitFarField
from nearfield_lab.embedded.model import save_model


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as running:
        yield running


@pytest.mark.parametrize("name", METHODS)
def test_split_model_gives_what_the_whole_one_does(world: World, name: str) -> None:
    wanted = run(None, name)
    ran: list[Ran] = world.run(run, name)
    for one in ran:
        assert torch.allclose(one.outs[0], wanted.outs[0], rtol=1e-9, atol=1e-9)
        assert torch.equal(one.outs[0], one.outs[1])
        assert torch.equal(one.outs[0], ran[0].outs[0])  # bit-equal on all ranks
        assert torch.equal(one.outs[2], wanted.outs[2])  # nothing stays behind
        assert one.bytes_sent > 0
    assert not torch.allclose(wanted.outs[0], wanted.outs[2])


@pytest.mark.parametrize("name", ["two-way", "merged and sparse"])
def test_reference_images_are_split_too(world: World, name: str) -> None:
    wanted = run(None, name, ((6, 8),))
    for one in world.run(run, name, ((6, 8),)):
        assert torch.allclose(one.outs[0], wanted.outs[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["flux2", "qwen", "qwen_edit", "pixart", "wan", "wan_ti2v", "ltx"])
def test_other_models_are_split(world: World, kind: str) -> None:
    """Wrong by at most twice as much as one process in the same precision."""
    exact = run_kind(None, kind, torch.float64)
    budget = 2 * (run_kind(None, kind) - exact).norm()
    for out in world.run(run_kind, kind):
        assert (out - exact).norm() <= budget


@pytest.mark.parametrize("kind", ["flux2", "qwen_edit", "pixart"])
def test_other_models_merge_on_ranks(world: World, kind: str) -> None:
    """In double precision: which tokens are chosen may hang on the last digit."""
    wanted = run_kind(None, kind, torch.float64, "merged")
    for out in world.run(run_kind, kind, torch.float64, "merged"):
        assert torch.allclose(out, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(run_kind(None, kind, torch.float64), wanted)


def test_maps_serve_for_several_steps_on_every_rank(world: World) -> None:
    wanted = loop(None)
    for outs in world.run(loop):
        for out, one in zip(outs, wanted, strict=True):
            assert torch.allclose(out, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "is_checkpointed"),
    [("two-way", False), ("two-way", True), ("far", False), ("weighted", True), ("the default's", False)],
)
def test_gradients_averaged_over_ranks_are_those_of_one_process(
    world: World, name: str, is_checkpointed: bool
) -> None:
    """Up to the rounding of float32, in which FLUX rotates queries and keys even here."""
    wanted = gradients(None, False, name)
    for found in world.run(gradients, is_checkpointed, name):
        for mine, one in zip(found, wanted, strict=True):
            assert (mine - one).norm() <= torch.finfo(torch.float32).eps * one.norm()


def test_layers_may_differ_in_the_size_of_blocks(world: World) -> None:
    """Ranks part the tokens once, for all layers."""
    name = "tiles by layer"
    method = METHODS[name]
    assert isinstance(method, Hilbert)
    with blocks_as_on_a_gpu():
        assert {method.plan(Geometry(GRID, text=7), layer).q_block for layer in range(3)} == {16, 32}
    wanted = run_in_large_blocks(None, name)
    assert not torch.allclose(run(None, name).outs[0], wanted)
    for out in world.run(run_in_large_blocks, name):
        assert torch.allclose(out, wanted, rtol=1e-9, atol=1e-9)
    wanted_gradients = gradients_in_large_blocks(None, name)
    for found in world.run(gradients_in_large_blocks, name):
        for mine, one in zip(found, wanted_gradients, strict=True):
            assert (mine - one).norm() <= torch.finfo(torch.float32).eps * one.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["far", "weighted", "the default's", "text in summary"])
def test_summaries_travel_as_counted(world: World, name: str, dtype: torch.dtype) -> None:
    for counted in world.run(summarised, name, HEADS, dtype):
        assert counted.summaries >= 20
        assert counted.sent == counted.counted
        assert min(counted.sent) > 0


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("name", ["far", "weighted", "the default's", "text in summary"])
def test_summaries_are_those_of_one_process(world: World, name: str, key_heads: int) -> None:
    """Also where heads share keys, and with them the mean query: results of each rank, and gradients added up."""
    wanted = summarised_by_one(name, key_heads)
    ranks: list[Counted] = world.run(summarised, name, key_heads)
    for number, whole in enumerate(wanted):
        total = torch.zeros_like(whole)
        for one in ranks:
            if number < 2:
                torch.testing.assert_close(one.results[number], whole[:, :, one.held], rtol=1e-9, atol=1e-9)
            total[:, :, one.held] += one.results[number]
        if number >= 2:
            torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-9)
    for one in ranks:
        assert one.sent == one.counted


def test_every_rank_needs_a_summary() -> None:
    geometry, method = Geometry((4, 8), text=4), paper(tiles=4, shared="none", far=8)
    split = even_split(method, geometry, 5, 16)
    far = method.layer(geometry).far
    assert far is not None
    with pytest.raises(ValueError, match=r"^`far` must leave every rank a summary; got 8, none on rank \d\."):
        SplitFarField.of(far, split, 0, "mean")


def test_summary_tells_about_the_split(world: World) -> None:
    ran: list[Ran] = world.run(run, "two-way")
    for rank, one in enumerate(ran):
        assert f"split: 127 tokens over {world.size} ranks:" in one.summary
        assert "7 on all" in one.summary
        assert f"rank {rank} sends" in one.summary


def test_summary_tells_what_is_merged(world: World) -> None:
    wanted = run(None, "merged").summary
    for one in world.run(run, "merged"):
        assert f"split: 127 tokens over {world.size} ranks:" in one.summary
        assert "MiB per merged dense layer (forward, one sample)" in one.summary
        for line in wanted.splitlines():  # of all tokens, not of this rank's
            assert line in one.summary.splitlines()


LAYOUTS = [
    (Merge(region_size=16), Geometry((10, 12), text=7)),
    (Merge(0.3, region_size=7), Geometry((9, 13), text=5, text_first=False)),
    (Merge(region="window", region_size=9), Geometry((10, 11), references=((5, 7),))),
    (Merge(0.6, region_size=8) | paper(shared_tokens=16), Geometry((12, 10), text=3, references=((6, 9),))),
    (Merge(region_size=8) | paper(shared_tokens=16, far=4), Geometry((12, 10), text=3)),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("method", "geometry"), LAYOUTS)
def test_ranks_part_between_regions(method: Merge | Composition, geometry: Geometry, num_ranks: int) -> None:
    merged = method if isinstance(method, Composition) else Composition(method)
    split = split_between_regions(merged, geometry, num_ranks, 16)
    regions = merged.regions(geometry)
    begin = geometry.text if geometry.text_first else 0
    for one, sizes in ((split.whole, regions.lengths), (split.merged, regions.counts)):
        assert one.num_tokens == geometry.text + sum(sizes)
        place, owners = begin, list[int]()
        for size in sizes:
            (owner,) = set(one.owners[place : place + size].tolist())  # one rank has all of a region
            owners.append(owner)
            place += size
        for rank, mine in enumerate(split.regions):
            of_rank = [number for number, owner in enumerate(owners) if owner == rank]
            assert mine.lengths == tuple(regions.lengths[number] for number in of_rank)
            assert mine.counts == tuple(regions.counts[number] for number in of_rank)
    sizes = [mine.num_tokens for mine in split.regions]
    largest = max(regions.lengths)
    pieces = sum(map(len, merged.pieces(geometry)))
    assert max(sizes) - min(sizes) <= 2 * largest * pieces


SUMMARISED = [
    (Merge() | Hilbert(), Geometry((32, 48), text=64)),
    (Merge(0.75, region_size=16) | Hilbert(far=8), Geometry((32, 32), text=16, text_first=False)),
    (Merge(0.25) | Hilbert(shared="centre"), Geometry((40, 40), text=7, references=((32, 32),))),
    (Merge() | paper(shared="none", far=16), Geometry((32, 48), text=64)),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("method", "geometry"), SUMMARISED)
def test_ranks_part_between_summaries_before_and_after_merging(
    method: Composition, geometry: Geometry, num_ranks: int
) -> None:
    split = split_between_regions(method, geometry, num_ranks, 16)
    for one, layout in ((split.whole, geometry), (split.merged, method.shortened(geometry))):
        reader = method.layer(layout, 1)
        far = reader.far
        parts = [SplitFarField.of(far, one, rank, reader.summary) for rank in range(num_ranks)]
        numbers = [part.sizes.numel() for part in parts]
        assert sum(numbers) == len(far.sizes)
        assert min(numbers) > 0
        assert {part.num_summarised for part in parts} == {sum(int(part.sizes.sum()) for part in parts)}


def test_summaries_that_every_border_of_regions_would_tear_are_refused() -> None:
    """Text of 7 tokens shifts the regions against the summaries."""
    expected = (
        r"^`method` must leave each of 2 ranks a region to merge in; got 16 regions, none for rank 0 that begins on a "
        r"multiple of `far` \(16\), before and after merging\. Use fewer ranks, or smaller regions\. Or far=None"
    )
    with pytest.raises(ValueError, match=expected):
        split_between_regions(Merge() | Hilbert(), Geometry((32, 32), text=7), 2, 16)


def test_every_rank_needs_a_region() -> None:
    expected = r"^`method` must leave each of 4 ranks a region to merge in; got 2 regions, none for rank \d\. Use fewer"
    with pytest.raises(ValueError, match=expected):
        split_between_regions(Composition(Merge(region_size=64)), Geometry((8, 16)), 4, 16)


@pytest.mark.parametrize("about", ["target", "method", "tokens", "hidden_states"])
def test_ranks_that_were_started_differently_are_told(world: World, about: str) -> None:
    for answer in world.tell(disagreeing, about):
        assert isinstance(answer, Failed)
        assert answer[0] == "ValueError"
        assert f"`{about}` must be the same on every rank; got" in answer[1]


def test_what_cannot_be_split_is_refused(world: World) -> None:
    expected = [
        "`target` must be, or have, one of FluxTransformer2DModel",
        "`method` must decide by the geometry alone who reads whom to be split over ranks; got LogLinear(",
        "`method` must merge inside regions of the order to be split over ranks; got BipartiteMerge(",
        "`method` must merge inside regions of the order to be split over ranks; got Merge(",
        "`method` must decide by the geometry alone who reads whom to be split over ranks; got LogLinear(",
    ]
    for messages in world.run(refused):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)
        assert "got UNet2DConditionModel" in messages[0]


def test_caches_by_which_ranks_could_part_are_refused(world: World) -> None:
    for answer in world.tell(cached):
        assert isinstance(answer, Failed)
        assert "`target` must have no cache of diffusers where tokens are split over ranks; got" in answer[1]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A picture of a tiny random model of the embedded one's kind, with a dense layer and a dense step."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_model(path, lively_model(), packing="none")
    fields = (
        "--set tiles=4 --set shared=centre --set shared-tokens=16 --steps 3 --num 2 --size 64x96 --seed 5"
    )
    return ["generate", "--weights", str(path), *fields.split()]


def picture(folder: Path) -> torch.Tensor:
    images = [np.asarray(Image.open(path)) for path in sorted((folder / "hilbert").iterdir())]
    return torch.from_numpy(np.stack(images)).int()


def test_generate_gives_the_picture_of_one_process(world: World, words: list[str], tmp_path: Path) -> None:
    """Up to one step of 255, where a value lies on the border of two."""

    def with_output(folder: Path) -> list[str]:
        return [*words, "--images", str(folder / "images"), "--out", str(folder / "sheet.png")]

    assert cli.main(with_output(tmp_path / "one")) == 0
    answers = world.run(command, *with_output(tmp_path / "RANK"))
    again = world.run(command, *with_output(tmp_path / "again"))
    assert [code for code, _ in answers + again] == [0] * 2 * world.size
    assert f"tokens over {world.size} ranks" in answers[0][1]
    assert [text for _, text in answers[1:]] == [""] * (world.size - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "again", "one"]  # one rank writes
    one, split = picture(tmp_path / "one" / "images"), picture(tmp_path / "0" / "images")
    assert one.float().std() > 10
    assert (one - split).abs().max() <= 1
    assert torch.equal(split, picture(tmp_path / "again" / "images"))


def test_dense_pictures_are_not_split(world: World) -> None:
    for code, text in world.run(command, "generate", "--method", "dense"):
        assert code == 2
        assert "`--method` must be another than dense under torchrun; got dense." in text


def run_together(size: int, work: Callable[..., None], *args: Any) -> list[int | None]:
    """The exit codes of ranks that find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [CONTEXT.Process(target=work, args=(rank, size, port, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def test_generate_finds_its_ranks_under_torchrun(words: list[str], tmp_path: Path) -> None:
    """Four ranks, and the picture of one process, up to one step of 255."""
    files = ["--images", str(tmp_path / "split"), "--out", str(tmp_path / "sheet.png")]
    assert run_together(4, started_by_torchrun, [*words, *files]) == [0] * 4
    assert (tmp_path / "sheet.png").is_file()
    assert cli.main([*words, "--images", str(tmp_path / "one"), "--out", str(tmp_path / "one.png")]) == 0
    assert (picture(tmp_path / "one") - picture(tmp_path / "split")).abs().max() <= 1


def test_a_rank_killed_within_a_step_ends_the_others_with_one_line(words: list[str], tmp_path: Path) -> None:
    """Without waiting for the time limit of the group, which is half an hour."""
    (tmp_path / "told").mkdir()
    files = ["--images", str(tmp_path / "images"), "--out", str(tmp_path / "sheet.png")]
    codes = run_together(3, started_and_lost, [*words, *files], str(tmp_path / "told"), 9)
    assert codes == [1, 1, -signal.SIGKILL]
    for rank in range(2):
        told = (tmp_path / "told" / str(rank)).read_text().strip().splitlines()
        (line,) = [line for line in told if not line.endswith(" steps")]  # the first rank shows its progress
        assert line.startswith(
            f"nearfield: error: rank {rank} of 3 lost the others: one of them died, raised"
        )
    assert not (tmp_path / "sheet.png").exists()
