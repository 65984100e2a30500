"""The studio as a user meets it: the command as a process, its page in a headless Chromium."""

import contextlib
import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.browser import CHROMIUM, Browser, chromium
from tests.cats import lively_model
from tests.tiny_language_models import DOCUMENTS, language_model, tiny_tokenizer

from nearfield_lab.embedded.model import save_model

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="needs gradio (the extra `studio`)"
    ),
]
ROOT = Path(__file__).resolve().parents[1]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in ("src", "lab/src"))
PARTS = ("#model", "#tiles", "#picture", "#start", "#pair", "#figures", "#seams", "#summary")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def served(folder: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`nearfield studio` in a process of its own, whose temporary files lie in `folder`."""
    (folder / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": SOURCES, "TMPDIR": str(folder / "temporary")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "nearfield_lab", "studio", "--port", str(port), *arguments]
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.strip() == f"nearfield studio: http://127.0.0.1:{port}/", (
                folder / "stderr.txt"
            ).read_text()
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny.safetensors", lively_model())
    language_model(dtype=torch.float32, vocab_size=160).save_pretrained(tmp_path / "language")
    tiny_tokenizer().save_pretrained(tmp_path / "language")
    (tmp_path / "docs").mkdir()
    for index, text in enumerate(DOCUMENTS):
        (tmp_path / "docs" / f"{index}.txt").write_text(text)
    port = free_port()
    options = ["--weights", "tiny.safetensors", "--docs", "docs", "--language-model", "language"]
    with served(tmp_path, port, *options) as process:
        with chromium(tmp_path / "profile") as browser:
            browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
            browser.wait_for("document.querySelector('#picture img')")
            a_recipe_fills_in_the_fields(browser)
            fields_are_drawn(browser)
            pictures_are_made(browser, tmp_path / "page.png")
            a_job_is_cancelled(browser)
            results_are_shown(browser)
            a_question_is_answered(browser)
            assert browser.complaints == []
            elsewhere = [
                url for url in browser.requests if not url.startswith((f"http://127.0.0.1:{port}/", "data:"))
            ]
            assert elsewhere == []
        other_files_are_refused(tmp_path, port)
        other_names_are_refused(port)
        uploads_are_refused(port)
        assert listening_addresses(port) == {"127.0.0.1"}
        ends_cleanly(process, tmp_path)


def text_of(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"document.querySelector('{selector}').innerText")
    return found


def source_of(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"document.querySelector('{selector} img').src")
    return found


def a_recipe_fills_in_the_fields(browser: Browser) -> None:
    steps = "document.querySelector('#hilbert-dense_steps input, #hilbert-dense_steps textarea').value"
    assert browser.run("document.querySelector('#hilbert-near input').value") == "around"
    assert browser.run(steps) == "0.15"
    browser.choose("#recipe", "cats-close")
    browser.wait_for("document.querySelector('#recipe-words')?.innerText.includes('FID 23.2 (dense 22.2)')")
    browser.wait_for(f"{steps} == '3'")
    browser.wait_for("document.querySelector('#lora input').checked == false")
    browser.choose("#recipe", "cats-fast")
    browser.wait_for(f"{steps} == '0'")
    browser.wait_for("document.querySelector('#recipe-words').innerText.includes('with the embedded LoRA')")
    browser.wait_for("document.querySelector('#lora input').checked == true")


def fields_are_drawn(browser: Browser) -> None:
    """A change of a field is drawn; a wrong one is told in one sentence and leaves the picture."""
    browser.fill("#height input", 64)
    browser.fill("#width input", 64)
    browser.wait_for("document.querySelector('#drawing-message').innerText.includes('8x8: 80 tokens')")
    before = source_of(browser, "#picture")
    browser.fill("#hilbert-tiles textarea, #hilbert-tiles input", 2)
    browser.wait_for(f"document.querySelector('#picture img').src != {before!r}")
    browser.wait_for("document.querySelector('#drawing-message').innerText.includes('around: 32 tokens')")
    browser.choose("#hilbert-near", "tile")
    browser.wait_for("document.querySelector('#drawing-message').innerText.includes('tiles: 2 of')")
    before = source_of(browser, "#picture")
    browser.fill("#hilbert-dense_layers textarea, #hilbert-dense_layers input", "some")
    browser.wait_for("document.querySelector('#drawing-message').innerText.includes('dense_layers must be')")
    assert "Traceback" not in browser.run("document.body.innerText")
    assert source_of(browser, "#picture") == before
    browser.fill("#hilbert-dense_layers textarea, #hilbert-dense_layers input", "0")
    browser.wait_for("!document.querySelector('#drawing-message').innerText.includes('must')")


def pictures_are_made(browser: Browser, picture: Path) -> None:
    browser.fill("#steps input[type=number]", 2)
    browser.click("#start")
    browser.wait_for("document.querySelector('#message').innerText.includes('Done')")
    browser.wait_for("document.querySelectorAll('#pair img').length >= 2")
    browser.wait_for("document.querySelector('#seams img')?.naturalWidth >= 512")
    loaded = (
        "[...document.querySelectorAll('#pair img')].every(img => img.complete && img.naturalWidth == 64)"
    )
    browser.wait_for(loaded)
    dense, sparse = browser.run("[...document.querySelectorAll('#pair img')].slice(0, 2).map(img => img.src)")
    assert dense != sparse
    figures = text_of(browser, "#figures")
    for part in ("speed-up", "PSNR to dense", "LPIPS", "seam energy", "Hilbert(tiles=2", "dB"):
        assert part in figures
    summary = browser.run("document.querySelector('#summary textarea').value")
    assert "attention: 3 sparse" in summary
    parts_are_seen(browser, picture)


def parts_are_seen(browser: Browser, picture: Path) -> None:
    """Every part has its place on the screenshot, and something is drawn there."""
    browser.screenshot(picture, whole=True)
    with Image.open(picture) as shot:
        image = shot.convert("RGB")
    for part in PARTS:
        name = part.replace("#tiles", "#hilbert-tiles")
        script = (
            f"(({{x, y, width, height}}) => [x, y, x + width, y + height])(document.querySelector('{name}')"
        )
        box = browser.run(f"{script}.getBoundingClientRect())")
        assert box[2] - box[0] > 50, part
        assert box[3] <= image.height, part
        colours = image.crop([round(side) for side in box]).getcolors(2**24)
        assert colours is not None
        assert len(colours) > 5, f"{part} is blank"


def a_job_is_cancelled(browser: Browser) -> None:
    before = source_of(browser, "#pair")
    browser.fill("#height input", 256)
    browser.fill("#width input", 256)
    browser.fill("#steps input[type=number]", 100)
    browser.click("#start")
    browser.wait_for("document.querySelector('#message').innerText.match(/dense|sparse/)")
    browser.click("#stop")
    browser.wait_for(
        "document.querySelector('#message').innerText.match(/Cancelled after \\d+ of 200 steps/)"
    )
    assert source_of(browser, "#pair") == before


def results_are_shown(browser: Browser) -> None:
    """Quality first, with its front; then another file, which is another plot and another table."""
    browser.click_tab("Results")
    browser.wait_for("document.querySelector('#results-plot img')?.naturalWidth > 100")
    browser.wait_for("document.querySelector('#results-table').innerText.includes('pairs kept')")
    before = source_of(browser, "#results-plot")
    browser.choose("#results-name", "hilbert-h200")
    browser.wait_for("document.querySelector('#results-table').innerText.includes('speed up')")
    browser.wait_for(f"document.querySelector('#results-plot img').src != {before!r}")


def a_question_is_answered(browser: Browser) -> None:
    browser.click_tab("Retrieval")
    browser.fill("#question textarea, #question input", "Which river flows through Bern?")
    browser.click("#ask")
    browser.wait_for("document.querySelector('#report textarea').value.includes('computed again')")
    browser.wait_for("document.querySelector('#spans').innerText.includes('0.txt')")
    assert "full prefill" in text_of(browser, "#times")
    assert "computed again" in text_of(browser, "#spans").lower()


def status_of(port: int, path: str, host: str | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def other_files_are_refused(folder: Path, port: int) -> None:
    (folder / "secret.txt").write_text("secret")
    inside = next((folder / "temporary").glob("nearfield-studio-*/*/*.png"))
    assert status_of(port, f"/gradio_api/file={inside}") == 200
    paths = [folder / "secret.txt", folder / "tiny.safetensors", Path("/etc/hostname"), Path(__file__)]
    for path in (*paths, inside.parent / ".." / ".." / ".." / ".." / "secret.txt", "secret.txt"):
        assert status_of(port, f"/gradio_api/file={path}") in (403, 404), path


def other_names_are_refused(port: int) -> None:
    """A name that somebody else's page resolved to this machine."""
    assert status_of(port, "/") == 200
    assert status_of(port, "/", host="somewhere.example") == 400


def uploads_are_refused(port: int) -> None:
    body = (
        "--x\r\nContent-Disposition: form-data; name=files; filename=a.txt\r\n\r\n"
        + "a" * 5000
        + "\r\n--x--\r\n"
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        connection.request("POST", "/gradio_api/upload", body, headers)
        assert connection.getresponse().status == 413
    finally:
        connection.close()


def listening_addresses(port: int) -> set[str]:
    """Where the port is open, by the kernel's table."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [
        line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]
    ]
    found = [
        local for _, local, _, state, *_ in lines if state == "0A" and int(local.split(":")[1], 16) == port
    ]
    return {socket.inet_ntoa(bytes.fromhex(address.split(":")[0])[::-1]) for address in found}


def ends_cleanly(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Ctrl-C ends it at once, with nothing left behind and nothing complained about."""
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert time.monotonic() - started < 20
    assert process.stdout is not None
    assert process.stdout.read().splitlines()[-1] == "stopped"
    assert list((folder / "temporary").iterdir()) == []
    assert "Traceback" not in (folder / "stderr.txt").read_text()
