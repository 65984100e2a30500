"""The page itself. Gradio is imported here alone; the other modules of the folder make what it shows."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nearfield import recipes
from nearfield.cli import UsageError
from nearfield.methods import DEFAULT, Recipe
from nearfield_lab.missing import MissingExtra
from nearfield_lab.studio import asking, drawing, fields, jobs, results
from nearfield_lab.studio.asking import Library
from nearfield_lab.studio.models import PictureModel

TITLE = "nearfield studio"
TOLD = (UsageError, ValueError, TypeError, NotImplementedError, ImportError, OSError, torch.OutOfMemoryError)
"""What goes wrong by what was asked for; it is shown as one message. Anything else is a fault of the program."""

_OWN_FIELDS = "none"
_WORK, _DRAWING = "work", "drawing"  # one model runs at a time, and pictures are drawn at the same time
STYLE = """
#message, #drawing-message { min-height: 1.5em; }
.gradio-container { max-width: 1500px !important; }
#summary textarea, #report textarea { font-family: monospace; font-size: 12px; }
"""


def gradio(folder: Path) -> Any:
    """The package, set up before it is imported: its files in one folder, and nothing sent to anybody."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import gradio

    return gradio


def require_gradio() -> None:
    """Raise, with the remedy, where the extra is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise MissingExtra("gradio", extra="studio", purpose="for the studio")


def theme(gr: Any) -> Any:
    """Fonts of the system: others would be fetched from elsewhere."""
    plain, mono = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
    return gr.themes.Default(font=plain, font_mono=mono, primary_hue="blue", neutral_hue="slate")


def build(gr: Any, models: Sequence[PictureModel], library: Library, folder: Path | None = None) -> Any:
    """The page with its three tabs.

    Args:
        models: to choose from; the first is chosen.
        folder: where results are; by default the folder of the checkout.
    """
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown(f"# {TITLE}\nA method only decides who reads whom; one operation does the reading.")
        with gr.Tab("Generate", elem_id="generate-tab"):
            _generate_tab(gr, page, {model.name: model for model in models})
        with gr.Tab("Results", elem_id="results-tab"):
            _results_tab(gr, page, folder or results.RESULTS)
        with gr.Tab("Retrieval", elem_id="retrieval-tab"):
            _retrieval_tab(gr, library)
    return page.queue(max_size=16, default_concurrency_limit=1)


# -- generate ----------------------------------------------------------------------------------------------------------


class _Inputs:
    """What can be set on the first tab, and what it comes to."""

    def __init__(self, gr: Any, models: dict[str, PictureModel]) -> None:
        self._models = models
        first = next(iter(models.values()))
        self.model = gr.Dropdown(list(models), value=first.name, label="model", elem_id="model")
        with gr.Row():
            self.height = _number(gr, "height", first.size)
            self.width = _number(gr, "width", first.size)
        with gr.Row():
            self.steps = gr.Slider(1, jobs.MOST_STEPS, value=20, step=1, label="steps", elem_id="steps")
            self.seed = _number(gr, "seed", 0)
        takes_prompt = any(model.takes_prompt for model in models.values())
        self.prompt = gr.Textbox(label="prompt", visible=takes_prompt, elem_id="prompt")
        self.recipe = gr.Dropdown(
            [_OWN_FIELDS, *recipes.names()],
            value=_OWN_FIELDS,
            label="recipe",
            info="fills in the fields below",
            elem_id="recipe",
        )
        self.recipe_words = gr.Markdown(visible=False, elem_id="recipe-words")
        self.method = gr.Dropdown(list(fields.METHODS), value=DEFAULT.name, label="method", elem_id="method")
        self.groups, self._names, self._boxes = [], list[tuple[str, str]](), []
        for method in fields.METHODS:
            with gr.Group(visible=method == DEFAULT.name) as group, gr.Row():
                for box in fields.boxes(method):
                    self._names.append((method, box.field.name))
                    self._boxes.append(_box(gr, method, box))
            self.groups.append(group)
        self.lora = gr.Checkbox(
            value=True,
            label="LoRA",
            info="the embedded one, where it was made for the method",
            elem_id="lora",
        )
        self.layer = gr.Slider(0, 63, value=0, step=1, label="first layer drawn", elem_id="layer")

    @property
    def all(self) -> list[Any]:
        fixed = [
            self.model,
            self.height,
            self.width,
            self.steps,
            self.seed,
            self.prompt,
            self.method,
            self.layer,
            self.lora,
        ]
        return [*fixed, *self._boxes]

    @property
    def filled(self) -> list[Any]:
        """What a recipe sets."""
        return [self.recipe_words, self.method, self.lora, *self._boxes]

    def fill(self, gr: Any, name: str) -> list[Any]:
        """The fields of a recipe, and what was measured with them, in the places of `filled`."""
        if name == _OWN_FIELDS:
            return [gr.update(visible=False)] + [gr.skip()] * (2 + len(self._boxes))
        recipe = recipes.read(name)
        method, values = fields.filled_in(recipe.method)
        boxes = [values[field] if owner == method else gr.skip() for owner, field in self._names]
        return [gr.update(value=recipe_words(recipe), visible=True), method, recipe.lora != "none", *boxes]

    def read(self, values: Sequence[Any]) -> tuple[PictureModel, jobs.Request, int]:
        """The model, the request and the first layer to draw; raises one of `TOLD`."""
        model, height, width, steps, seed, prompt, method, layer, with_lora = values[:9]
        given = {
            name: value
            for (owner, name), value in zip(self._names, values[9:], strict=True)
            if owner == method
        }
        made = fields.method_of(method, given)
        request = jobs.Request(height, width, steps, seed, made, prompt or "", with_lora)
        jobs.check_request(self._models[model], request)
        return self._models[model], request, int(layer)


def recipe_words(recipe: Recipe) -> str:
    """What was measured with a recipe that ships, in one sentence."""
    found = recipe.measured
    lora = "with the embedded LoRA" if recipe.lora == "embedded" else "without a LoRA"
    return (
        f"On the embedded model, {lora}: {found['pairs_kept']:.1%} of the pairs, FID {found['fid']:.1f} "
        f"(dense {found['dense_fid']:.1f}), LPIPS {found['lpips']:.3f}; {found['pictures']} pictures of "
        f"{found['size']} px, {found['steps']} steps, {found['device']}."
    )


def _number(gr: Any, name: str, value: int) -> Any:
    return gr.Number(value=value, precision=0, label=name, elem_id=name, min_width=80)


def _box(gr: Any, method: str, box: fields.Box) -> Any:
    field = box.field
    shared = {
        "label": field.name,
        "info": field.help,
        "elem_id": f"{method}-{field.name}",
        "value": box.value,
    }
    shared["min_width"] = 140
    if field.kind == "choice":
        return gr.Dropdown(list(field.choices), **shared)
    if field.kind == "flag":
        return gr.Checkbox(**shared)
    if field.kind == "text":
        return gr.Textbox(**shared)
    return gr.Number(precision=0 if field.kind == "integer" else None, **shared)


def _generate_tab(gr: Any, page: Any, models: dict[str, PictureModel]) -> None:
    running = jobs.Jobs()
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            inputs = _Inputs(gr, models)
        with gr.Column(scale=3):
            problems = "\n\n".join(
                f"**{model.name}**: {model.problem}" for model in models.values() if model.problem
            )
            gr.Markdown(problems, visible=bool(problems), elem_id="missing")
            picture = gr.Image(label="who reads whom", show_label=False, elem_id="picture", **_shown())
            told = gr.Markdown(elem_id="drawing-message")
            with gr.Row():
                start = gr.Button("Generate dense and sparse", variant="primary", elem_id="start")
                stop = gr.Button("Cancel", elem_id="stop")
            message = gr.Markdown(elem_id="message")
            figures = gr.Dataframe(headers=list(jobs.HEADINGS), elem_id="figures", **_table())
            with gr.Row():
                pair = gr.ImageSlider(
                    label="dense | sparse, same noise", elem_id="pair", interactive=False, format="png"
                )
                seams = gr.Image(
                    label="gradient difference, borders of blocks or tiles", elem_id="seams", **_shown()
                )
            summary = gr.Textbox(label="handle.summary()", lines=8, elem_id="summary", interactive=False)

    def draw(*values: Any) -> tuple[Any, str]:
        try:
            model, request, layer = inputs.read(values)
            geometry = model.geometry(request.height, request.width)
            drawn, words = drawing.method_picture(geometry, request.method, layer, model.device)
            if drawn is None:
                return (
                    None,
                    f"{_code(words)}\n\nWho reads whom is chosen from queries and keys: there is no picture.",
                )
            return drawn, _code(words)
        except TOLD as error:
            return gr.skip(), _sentence(error)

    def wait(request: Any) -> str:
        running.begin(str(request.session_hash))
        return "Waiting for its turn."

    def make(request: Any, *values: Any, progress: Any = gr.Progress()) -> list[Any]:  # noqa: B008
        session = str(request.session_hash)
        stopped = running.begin(session)
        try:
            model, wanted, _ = inputs.read(values)
            made = jobs.make(
                model, wanted, stopped, lambda done, total, doing: progress((done, total), desc=doing)
            )
        except (*TOLD, jobs.Cancelled) as error:
            return [gr.skip()] * 4 + [_sentence(error)]
        finally:
            running.end(session)
        images = drawing.as_array(made.dense), drawing.as_array(made.sparse)
        return [images, made.rows, drawing.as_array(made.seams), made.summary, "Done."]

    def cancel(request: Any) -> Any:
        """The job says itself that it has stopped; said here, too, it could come later than that."""
        is_running = running.cancel(str(request.session_hash))
        return gr.skip() if is_running else "Nothing is running."

    def leave(request: Any) -> None:
        running.cancel(str(request.session_hash))

    for function in (
        wait,
        make,
        cancel,
        leave,
    ):  # Gradio knows by the annotation which argument is the request
        function.__annotations__["request"] = gr.Request

    def show_fields(method: str) -> list[Any]:
        return [gr.update(visible=name == method) for name in fields.METHODS]

    inputs.recipe.input(lambda name: inputs.fill(gr, name), inputs.recipe, inputs.filled, **_quiet)
    inputs.method.change(show_fields, inputs.method, inputs.groups, **_quiet)
    gr.on(
        [page.load, *(box.change for box in inputs.all)],
        draw,
        inputs.all,
        [picture, told],
        trigger_mode="always_last",
        concurrency_id=_DRAWING,
        **_quiet,
    )
    outputs = [pair, figures, seams, summary, message]
    # Noted at once, so that a job can be cancelled while others are before it.
    asked = start.click(wait, None, message, queue=False, **_quiet)
    asked.then(
        make, inputs.all, outputs, concurrency_id=_WORK, show_progress_on=message, api_visibility="private"
    )
    stop.click(cancel, None, message, queue=False, **_quiet)
    page.unload(leave)


# -- results -----------------------------------------------------------------------------------------------------------


def _results_tab(gr: Any, page: Any, folder: Path) -> None:
    names = results.names(folder)
    if not names:
        gr.Markdown(results.NONE_THERE, elem_id="no-results")
        return
    name = gr.Dropdown(names, value=names[0], label="results", elem_id="results-name")
    about = gr.Markdown(elem_id="results-about")
    plot = gr.Image(label="plot", show_label=False, elem_id="results-plot", **_shown())
    table = gr.Dataframe(elem_id="results-table", **_table())
    if not any(each.startswith("quality") for each in names):
        gr.Markdown("Quality was not measured here yet; its Pareto plot stands here once it is.")

    def choose(chosen: str) -> tuple[Any, ...]:
        try:
            found = results.read(chosen, folder)
            picture = drawing.drawn(found.draw) if found.draw else None
            cells = {"headers": found.headings, "data": found.rows}
            return found.about, gr.update(value=picture, visible=picture is not None), cells
        except TOLD as error:
            return _sentence(error), gr.skip(), gr.skip()

    triggers = [page.load, name.change]
    gr.on(triggers, choose, name, [about, plot, table], concurrency_id=_DRAWING, **_quiet)


# -- retrieval ---------------------------------------------------------------------------------------------------------


def _retrieval_tab(gr: Any, library: Library) -> None:
    is_ready = library.problem is None
    gr.Markdown(f"{library.num_texts} texts." if is_ready else library.problem, elem_id="retrieval-message")
    first = asking.Question("")
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            text = gr.Textbox(label="question", elem_id="question", interactive=is_ready)
            selector = gr.Dropdown(
                list(asking.SELECTORS), value=first.selector, label="which tokens", interactive=is_ready
            )
            ratio = gr.Slider(0, 1, value=first.ratio, label="share computed again", interactive=is_ready)
            top = gr.Slider(
                1, asking.MOST_CHUNKS, value=first.top, step=1, label="chunks", interactive=is_ready
            )
            size = gr.Slider(
                16,
                asking.MOST_CHUNK_TOKENS,
                value=first.chunk_tokens,
                step=16,
                label="tokens per chunk",
                interactive=is_ready,
            )
            longest = gr.Slider(
                1,
                asking.MOST_NEW_TOKENS,
                value=first.max_new_tokens,
                step=1,
                label="tokens of the answer",
                interactive=is_ready,
            )
            ask = gr.Button("Ask", variant="primary", elem_id="ask", interactive=is_ready)
        with gr.Column(scale=3):
            message = gr.Markdown(elem_id="ask-message")
            answer = gr.Textbox(label="answer", elem_id="answer", interactive=False)
            times = gr.Dataframe(headers=list(asking.HEADINGS), elem_id="times", **_table())
            spans = gr.HighlightedText(
                label="what was read", elem_id="spans", color_map={asking.AGAIN: "orange"}
            )
            report = gr.Textbox(label="report", lines=4, elem_id="report", interactive=False)

    def reply(*values: Any) -> list[Any]:
        try:
            found = library.ask(asking.Question(*values))
        except TOLD as error:
            return [gr.skip()] * 4 + [_sentence(error)]
        return [found.answer, found.rows, found.spans, found.report, ""]

    inputs, outputs = [text, selector, ratio, top, size, longest], [answer, times, spans, report, message]
    for trigger in (ask.click, text.submit):
        trigger(reply, inputs, outputs, concurrency_id=_WORK, api_visibility="private")


# -- details -----------------------------------------------------------------------------------------------------------

_quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def _shown() -> dict[str, Any]:
    return {"interactive": False, "format": "png", "buttons": ["download", "fullscreen"]}


def _table() -> dict[str, Any]:
    return {"interactive": False, "wrap": True}


def _code(words: str) -> str:
    return f"```text\n{words}\n```"


def _sentence(error: BaseException) -> str:
    """One message, without the markup that Markdown would make of a path or a name."""
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__).replace("<", "&lt;")
