"""What the studio's page shows, without the page: methods from fields, pictures, jobs, results, questions."""

import dataclasses
import json
import socket
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests import command_line as cli
from tests import tiny_models
from tests.cats import SIZE, lively_model
from tests.tiny_language_models import DOCUMENTS, language_model, tiny_tokenizer

from nearfield import Geometry, Hilbert, Merge, PlanMethod, recipes
from nearfield.cli.arguments import UsageError
from nearfield.methods import DEFAULT, BlockTopK, GatedBlocks, method_class, own_methods
from nearfield.methods.recipes import Recipe
from nearfield_lab import quality
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.model import save_model
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.studio import asking, drawing, fields, jobs, page, results
from nearfield_lab.studio.asking import AGAIN, Library, Question
from nearfield_lab.studio.models import PictureModel
from nearfield_lab.studio.server import is_loopback
from nearfield_lab.training.distill import save_lora

CPU = torch.device("cpu")
FEW_TILES = Hilbert(tiles=4, near="tile", dense_layers=0, dense_steps=0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studio") / "tiny.safetensors"
    save_model(path, lively_model())
    return path


@pytest.fixture(scope="module")
def model(weights: Path) -> PictureModel:
    return PictureModel(CPU, weights)


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fields.METHODS)
def test_every_field_of_a_method_is_offered(name: str) -> None:
    kind = method_class(name)
    found = fields.boxes(name)
    assert [box.field.name for box in found] == [field.name for field in dataclasses.fields(kind)]
    assert fields.method_of(name, {box.field.name: box.value for box in found}) == kind()
    assert fields.method_of(name, dict.fromkeys(box.field.name for box in found)) == kind()


def test_every_method_that_pictures_can_have_is_offered() -> None:
    """Their sequences hold text."""
    assert {kind.name for kind in own_methods() if kind.takes_text} <= set(fields.METHODS)
    assert all(method_class(name).takes_text for name in fields.METHODS)
    assert next(iter(fields.METHODS)) == DEFAULT.name


def test_fields_make_the_method() -> None:
    values = {box.field.name: box.value for box in fields.boxes("hilbert")}
    assert fields.method_of("hilbert", values) == Hilbert()
    values |= {"tiles": " 9 ", "far": "64", "share": "keys", "dense_layers": "0,-1", "dense_steps": "2"}
    wanted = Hilbert(tiles=9, far=64, share="keys", dense_layers=(0, -1), dense_steps=2)
    assert fields.method_of("hilbert", values) == wanted
    values |= {"tiles": "", "near": "tile", "summary": "mean", "interleave": True, "cycle": 4.0}
    wanted = dataclasses.replace(wanted, tiles=None, near="tile", summary="mean", interleave=True)
    assert fields.method_of("hilbert", values) == wanted


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_that_ship_fill_in_the_fields(name: str) -> None:
    recipe = recipes.read(name)
    method, values = fields.filled_in(recipe.method)
    assert set(values) == {field.name for field in fields.METHODS[method]}
    assert fields.method_of(method, values) == recipe.method
    words = page.recipe_words(recipe)
    dense = {"cats-close": "22.2", "cats-fast": "19.4"}[name]
    assert f"FID {recipe.measured['fid']:.1f} (dense {dense})" in words
    assert ("with the embedded LoRA" in words) == (recipe.lora == "embedded")


@pytest.mark.parametrize(
    "method",
    [
        Hilbert(tiles=9, far=None, dense_layers=(3,), dense_steps=0.25),
        Hilbert(
            tiles=4, near="tile", shared="centre", shared_tokens=64, dense_layers=(0, -1), interleave=True
        ),
        Hilbert(near="tile", summary="mean"),
        Hilbert(),
        Hilbert(dense_steps=(1, 0.1)),
        Hilbert(tile_size=64),
        Hilbert(tiles=(4, 16)),
        Merge(0.25, refresh=(3, 1)),
        *(method_class(name)() for name in fields.METHODS),
    ],
)
def test_fields_of_a_method_are_filled_in(method: Any) -> None:
    assert fields.method_of(*fields.filled_in(method)) == method


@pytest.mark.parametrize("method", [GatedBlocks(), Merge(0.5) | Hilbert()])
def test_methods_that_the_page_cannot_show_are_refused(method: Any) -> None:
    with pytest.raises(ValueError) as caught:
        fields.filled_in(method)
    offered = ", ".join(method_class(name).__name__ for name in fields.METHODS)
    assert str(caught.value) == (
        f"`recipe` must have a method that the page offers; got {method.label}. It offers {offered}."
    )
    assert offered.startswith("Hilbert, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": "0"}, "`tiles` must be at least 1; got 0"),
        ({"interleave": True}, '`interleave` must be False where `near` is "around"; got True.'),
        ({"far": "1"}, "`far` must be at least 2; got 1"),
        (
            {"shared": "centre", "shared_tokens": "many"},
            "`shared_tokens` must be an integer or none; got 'many'",
        ),
        ({"dense_layers": "a"}, "`dense_layers` must be an integer or numbers between commas; got 'a'"),
        (
            {"dense_steps": "-1"},
            "`dense_steps` must be a share from 0 to 1 or a whole number of steps; got -1",
        ),
        ({"curve": "spiral"}, "`curve` must be one of"),
    ],
)
def test_wrong_fields_are_one_message(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        fields.method_of("hilbert", change)
    assert str(caught.value).startswith(message)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_picture_follows_fields_and_layer() -> None:
    geometry = Geometry((16, 16), text=16)

    def picture(method: Hilbert, layer: int = 0) -> bytes:
        made: bytes = drawing.method_picture(geometry, method, layer, CPU)[0].tobytes()
        return made

    tiles = Hilbert(near="tile", tiles=4)
    first = picture(tiles)
    assert first == picture(tiles)
    assert first != picture(Hilbert(near="tile", tiles=8))
    assert first != picture(tiles, layer=1)
    assert "272 tokens" in drawing.method_picture(geometry, tiles, 0, CPU)[1]
    around = picture(Hilbert())
    assert around == picture(Hilbert())
    assert around not in (first, picture(Hilbert(tiles=8)))
    assert "around: 64 tokens" in drawing.method_picture(geometry, Hilbert(), 0, CPU)[1]


def test_too_much_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`grid` must hold at most 65,536 tokens to be drawn"):
        drawing.method_picture(Geometry((512, 512), text=0), Hilbert(), 0, CPU)


@pytest.mark.parametrize("name", fields.METHODS)
def test_what_content_decides_is_told_without_a_picture(name: str) -> None:
    method = fields.method_of(name, {})
    drawn, words = drawing.method_picture(Geometry((16, 16), text=16), method, 0, CPU)
    assert words == method.describe(Geometry((16, 16), text=16))
    assert (drawn is not None) == isinstance(method, PlanMethod)


def test_gradient_difference_is_between_pixels() -> None:
    dense = torch.full((4, 6, 3), 100, dtype=torch.uint8)
    assert not drawing.gradient_difference(dense, dense + 50).any()
    sparse = dense.clone()
    sparse[:, 3:] += 40
    found = drawing.gradient_difference(dense, sparse)
    assert found[:, 2].tolist() == [20.0] * 4
    assert float(found.sum()) == 80.0


def test_seam_map_shows_differences_and_borders() -> None:
    dense = torch.full((32, 32, 3), 100, dtype=torch.uint8)
    sparse = dense.clone()
    sparse[8, 8] = 200
    borders = quality.Borders(torch.zeros(4, 3), torch.zeros(3, 4))
    borders.right[:, 1] = 1.0
    plain, lined = drawing.seam_map(dense, sparse, None), drawing.seam_map(dense, sparse, borders)
    assert plain.shape == lined.shape == (512, 512, 3)
    assert (plain[0, 0] == 255).all()
    assert (plain[8 * 16 + 1, 8 * 16 + 1] < 128).all(), "a step is dark"
    differs = (plain != lined).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert differs == [256], "one line, between the second and the third column of tokens"


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_pictures_come_from_the_same_noise(model: PictureModel, weights: Path) -> None:
    everything = Hilbert(tiles=1, shared="none", dense_layers=0, dense_steps=0)
    seen = list[tuple[int, int, str]]()
    request = jobs.Request(64, 72, 3, 5, everything)
    made = jobs.make(model, request, on_progress=lambda *now: seen.append(now))
    alone = DemoPipeline.load(weights)(1, size=(64, 72), steps=3, seed=5).images[0]
    assert torch.equal(made.dense, alone)
    assert (made.sparse.int() - made.dense.int()).abs().max() <= 1, "one tile reads everything"
    assert [now[0] for now in seen] == list(range(6))
    assert seen[0] == (0, 6, "dense")
    assert seen[-1] == (5, 6, "sparse")


@pytest.mark.parametrize(
    "few", [FEW_TILES, dataclasses.replace(FEW_TILES, near="around")], ids=lambda few: few.near
)
def test_figures_are_of_both(few: Hilbert, model: PictureModel) -> None:
    made = jobs.make(model, jobs.Request(64, 64, 2, 0, few))
    dense, sparse = (dict(zip(jobs.HEADINGS, row, strict=True)) for row in made.rows)
    assert dense[""] == "dense"
    assert dense["speed-up"] == "-"
    assert sparse["speed-up"].endswith("x")
    first, second = (picture.permute(2, 0, 1)[None] for picture in (made.dense, made.sparse))
    assert sparse["PSNR to dense"] == f"{float(quality.psnr(first, second)):.1f} dB"
    assert sparse["LPIPS"] == f"{float(quality.load_lpips()(first, second)):.3f}"
    borders = few.borders(model.geometry(64, 64), q_block=16)
    for picture, row in ((first, dense), (second, sparse)):
        energy = quality.seam_energy(quality.line_gradients(picture, borders))
        assert row["seam energy"] == f"{energy.value:.3f}"
    assert "Hilbert(tiles=4" in made.summary
    assert not torch.equal(made.dense, made.sparse)


@pytest.mark.parametrize("name", [name for name in fields.METHODS if name != "hilbert"])
def test_every_method_makes_a_picture(name: str, model: PictureModel) -> None:
    method = fields.method_of(name, {box.field.name: box.value for box in fields.boxes(name)})
    made = jobs.make(model, jobs.Request(64, 64, 2, 0, method))
    assert made.sparse.shape == (64, 64, 3)
    assert type(method).__name__ in made.summary
    borders = method.borders(model.geometry(64, 64))
    is_cut = borders is not None and bool((borders.right.sum() + borders.below.sum()) > 0)
    assert (made.rows[1][-1] != "-") == is_cut, "without tiles or regions no borders"
    assert made.summary.startswith("note: ") == (method.warning is not None)
    assert made.summary.startswith("note: LogLinear is made for models that") == (name == "loglinear")


def test_a_job_is_cancelled_and_leaves_no_trace(model: PictureModel) -> None:
    request = jobs.Request(64, 64, 3, 0, FEW_TILES)
    whole = jobs.make(model, request)
    running = jobs.Jobs()
    stop = running.begin("mine")
    assert not running.cancel("another")

    def cancel_while_sparse(done: int, total: int, doing: str) -> None:
        if doing == "sparse":
            assert running.cancel("mine")

    with pytest.raises(jobs.Cancelled, match=r"Cancelled after 4 of 6 steps\."):
        jobs.make(model, request, stop, cancel_while_sparse)
    running.end("mine")
    assert not running.cancel("mine")
    assert running.begin("mine") is running.begin("mine"), "asked for, then run"
    assert running.cancel("mine"), "while it waits"
    with pytest.raises(jobs.Cancelled, match=r"Cancelled after 0 of 6 steps\."):
        jobs.make(model, request, running.begin("mine"))
    assert torch.equal(jobs.make(model, request, threading.Event()).dense, whole.dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 101}, "`steps` must be at most 100; got 101."),
        ({"steps": 0}, "`steps` must be at least 1; got 0."),
        ({"seed": -1}, "`seed` must be at least 0; got -1."),
        ({"width": 65}, "`width` must be a multiple of 8 pixels, from 32; got 65."),
        ({"height": 0}, "`height` must be a multiple of 8 pixels, from 32; got 0."),
        ({"height": None}, "`height` must be a multiple of 8 pixels, from 32; got None."),
        ({"height": 2048}, "`size` must be at most 1024 x 1024 pixels on this device; got 2048 x 1024."),
    ],
)
def test_limits(change: dict[str, Any], message: str, model: PictureModel) -> None:
    request = jobs.Request(64, 1024, 2, 0, FEW_TILES)._replace(**change)
    with pytest.raises(ValueError) as caught:
        jobs.make(model, request)
    assert str(caught.value) == message


def test_missing_weights_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "EMBEDDED", tmp_path / "none.safetensors")
    embedded = PictureModel(CPU)
    assert embedded.problem is not None
    assert "--weights FILE" in embedded.problem
    assert embedded.geometry(256, 256).grid == (32, 32), "what it would read can still be drawn"
    with pytest.raises(generate.NoWeights, match="--weights FILE"):
        jobs.make(embedded, jobs.Request(64, 64, 2, 0, FEW_TILES))


def test_the_lora_for_tiles_is_used_for_tiles_alone(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model with its LoRA, which dense pictures and other methods do without."""
    tuned = lively_model()
    changes = peft.LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False)
    tuned.transformer.add_adapter(changes, adapter_name="nearfield")
    facts = {"recipe": Recipe(FEW_TILES).as_document()}
    save_lora(tmp_path / "lora.safetensors", tuned.transformer, facts)
    monkeypatch.setattr(generate, "EMBEDDED", weights)
    monkeypatch.setattr("nearfield_lab.studio.models.EMBEDDED_LORA", tmp_path / "lora.safetensors")
    embedded, plain = PictureModel(CPU), PictureModel(CPU, weights)
    tiles, blocks = (jobs.Request(64, 64, 2, 0, method) for method in (FEW_TILES, BlockTopK(keep=0.5)))
    others = jobs.Request(64, 64, 2, 0, dataclasses.replace(FEW_TILES, tiles=2))
    without = tiles._replace(with_lora=False)
    for request, is_changed in (
        (tiles, True),
        (blocks, False),
        (others, False),
        (without, False),
        (tiles, True),
    ):
        here, there = jobs.make(embedded, request), jobs.make(plain, request)
        assert torch.equal(here.dense, there.dense)
        assert torch.equal(here.sparse, there.sparse) is not is_changed
        assert ("note: with the embedded LoRA\n" in here.summary) is is_changed
        assert "LoRA" not in there.summary


def test_a_pipeline_is_not_opened_to_be_drawn() -> None:
    pipeline = PictureModel(CPU, pipeline="nobody/nothing")
    assert pipeline.geometry(1024, 768) == Geometry((64, 48), text=512)
    assert pipeline.problem is None
    assert pipeline.takes_prompt


def test_a_pipeline_makes_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, tiny and without text encoders. Its tokens are 2 pixels wide, not the 16 that are drawn before."""
    call = tiny_models.flux_call()
    embeds = {name: call[name] for name in ("prompt_embeds", "pooled_prompt_embeds", "guidance_scale")}
    sampler = generate.pipeline_sampler

    def encoded(pipeline: Any, prompt: str, num: int, **options: Any) -> generate.Sampler:
        assert prompt == "a cat"
        return sampler(pipeline, embeds, num, **options)

    monkeypatch.setattr(generate, "open_pipeline", lambda name, device: tiny_models.flux_pipeline())
    monkeypatch.setattr(generate, "pipeline_sampler", encoded)
    pipeline = PictureModel(CPU, pipeline="some/pipeline")
    with pytest.raises(ValueError, match="`prompt` must say what to draw; got ' '"):
        jobs.make(pipeline, jobs.Request(64, 80, 2, 0, FEW_TILES, " "))
    made = jobs.make(pipeline, jobs.Request(64, 80, 2, 0, FEW_TILES, "a cat"))
    assert made.dense.shape == made.sparse.shape == (64, 80, 3)
    assert "32x40" in made.summary
    assert made.rows[1][-1] == "-", "too narrow for an energy"


def test_model_takes_its_size_from_the_file(model: PictureModel) -> None:
    assert (model.size, model.text, model.name) == (SIZE, 16, "tiny.safetensors")


# -- results -----------------------------------------------------------------------------------------------------------


def test_committed_results_are_read() -> None:
    found = [results.read(name) for name in results.names()]
    kinds = {one.kind for one in found}
    assert {"attend", "hilbert", "model"} <= kinds
    for one in found:
        assert one.rows
        assert all(len(row) == len(one.headings) for row in one.rows)
        assert any(cell != "-" for row in one.rows for cell in row)
    model_file = next(one for one in found if one.kind == "model")
    assert "speed up" in model_file.headings
    trained = next(one for one in found if one.kind == "pixel-training")
    assert trained.headings[-2:] == ["equal time loss", "equal time fid"]


def test_committed_results_are_drawn() -> None:
    """One file of each kind that the library has a picture for."""
    by_kind = {one.kind: one for one in map(results.read, results.names())}
    pictures = {kind: drawing.drawn(one.draw) for kind, one in by_kind.items() if one.draw}
    assert {"attend", "hilbert", "model", "pixel-training"} <= set(pictures)
    assert all(min(picture.size) > 100 for picture in pictures.values())


def test_quality_results_have_the_front(tmp_path: Path) -> None:
    rows = [
        quality.QualityRow("dense", 1.0, 10, fid=20.0),
        quality.QualityRow("4 tiles", 0.3, 10, fid=25.0, lpips=0.1),
    ]
    from nearfield._files import write_json
    from nearfield_lab.quality.results import as_document

    machine = {"gpus": [], "cpu": {"name": "some CPU"}}
    write_json(tmp_path / "quality-cats.json", as_document(rows, machine, "cats"))
    (tmp_path / "attend-x.json").write_text('{"results": 3}')
    (tmp_path / "broken.json").write_text("{")
    assert results.names(tmp_path) == ["quality-cats", "attend-x", "broken"]
    found = results.read("quality-cats", tmp_path)
    assert found.about == "`quality` on some CPU"
    assert found.rows[1][found.headings.index("lpips")] == "0.1"
    assert found.draw is not None
    assert min(drawing.drawn(found.draw).size) > 100
    for name in ("attend-x", "broken"):
        with pytest.raises(ValueError, match=rf"{name}\.json holds no benchmark results: "):
            results.read(name, tmp_path)


def test_only_listed_results_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps({"results": []}))
    inside = tmp_path / "results"
    assert results.names(inside) == []
    with pytest.raises(ValueError, match="`name` must be one of"):
        results.read("../secret", inside)


# -- retrieval ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = tmp_path_factory.mktemp("retrieval")
    language_model(dtype=torch.float32, vocab_size=160).save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    (path / "docs").mkdir()
    for index, text in enumerate(DOCUMENTS):
        (path / "docs" / f"{index}.txt").write_text(text)
    return Library(path / "docs", path / "model", CPU)


def test_answer_shows_what_was_computed_again(library: Library) -> None:
    assert library.problem is None
    asked = library.ask(Question("Which river?", ratio=0.25, top=2, max_new_tokens=4))
    texts = "".join(text for text, _ in asked.spans)
    shown = [index for index, text in enumerate(DOCUMENTS) if f"[{index}.txt]\n{text}" in texts]
    assert len(shown) == 2
    tokenizer = tiny_tokenizer()
    again = "".join(text for text, label in asked.spans if label == AGAIN)
    counted = int(asked.report.split(" computed")[0].split()[-1])
    assert counted > 0
    assert 0 < len(again) <= counted * max(map(len, tokenizer.get_vocab()))
    full, reused = asked.rows
    assert full[0] == "full prefill"
    assert reused[0] == "infoflow, 25%"
    assert len(full) == len(reused) == len(asking.HEADINGS)
    everything = library.ask(Question("Which river?", selector="all", top=2, max_new_tokens=1))
    labels = [label for _, label in everything.spans]
    assert labels == [None, None, None, AGAIN], "names; the first text was computed right where it stands"


def test_spans_are_runs_of_tokens() -> None:
    class Letters:
        def decode(self, tokens: torch.Tensor) -> str:
            return "".join(chr(97 + int(token)) for token in tokens)

    tokens, rows = torch.arange(8), torch.tensor([0, 3, 4, 7])
    spans = asking.spans_of(Letters(), tokens, rows, [3, 3], ["x", "y"])
    assert spans == [
        ("\n[x]\n", None), ("c", None), ("de", AGAIN),
        ("\n[y]\n", None), ("fg", None), ("h", AGAIN),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question(" "), "`question` must not be empty; got ' '."),
        (Question("a", top=0), "`top` must be a whole number from 1 to 32; got 0."),
        (
            Question("a", max_new_tokens=1000),
            "`max_new_tokens` must be a whole number from 1 to 256; got 1000.",
        ),
        (Question("a", ratio=1.5), "`ratio` must "),
    ],
)
def test_wrong_questions(question: Question, message: str, library: Library) -> None:
    with pytest.raises((ValueError, UsageError)) as caught:
        library.ask(question)
    assert str(caught.value).startswith(message)


def test_what_retrieval_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--docs FOLDER" in str(Library(None, None, CPU).problem)
    (tmp_path / "a.txt").write_text("a")
    assert "config.json" in str(Library(tmp_path, tmp_path, CPU).problem)
    monkeypatch.setattr("nearfield.retrieval.embedded._PACKAGE", "not_installed_here")
    problem = Library(tmp_path, None, CPU).problem
    assert "pip install" in str(problem)
    assert "--language-model" in str(problem)
    with pytest.raises(UsageError, match="pip install"):
        Library(tmp_path, None, CPU).ask(Question("a"))


# -- command -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("box", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "no-such-file"], "`--weights` must name a file that is there; got 'no-such-file'."),
        (["--weights", __file__, "--model", "x"], "`--weights` must be left out with `--model`"),
        (["--port", "70000"], "`--port` must be at most 65,535; got 70,000."),
        (
            ["--host", " "],
            "`--host` must be an IPv4 address of this machine, and `--port` free there; got ' ', any port",
        ),
        (
            ["--host", "::1"],
            "`--host` must be an IPv4 address of this machine, and `--port` free there; got '::1'",
        ),
        (
            ["--host", "192.0.2.1"],
            "`--host` must be an IPv4 address of this machine, and `--port` free there; got",
        ),
    ],
)
def test_bad_calls(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["studio", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.main(["studio", "--port", str(port)]) == 2
    assert f"`--port` free there; got '127.0.0.1', {port} (Address already in use)" in capsys.readouterr().err


def test_missing_gradio_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert cli.main(["studio"]) == 2
    assert "pip install 'nearfield-lab[studio]'" in capsys.readouterr().err
