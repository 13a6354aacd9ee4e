"""Draws the pictures of README.md and of the site; `make docs` runs it.

    python docs/pictures.py            # those that are missing
    python docs/pictures.py mask page  # these
    python docs/pictures.py --all      # all of them, in a few minutes on two cores

Most are what the library's own `af.report.figure` makes of a result. All have colours for light and for dark pages.
"""

import base64
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.text import Text
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainingArguments

import attnflow as af
from attnflow.report.charts import svg_of
from attnflow.report.svg import Svg, standalone

FOLDER = Path(__file__).parent / "pictures"
SUM = "Q: John has 5 apples. He buys 6 more. A: 5 + 6 ="


def mask() -> Any:
    """A mask: blocks of clean tokens, and blocks that are to be predicted from the blocks before them."""
    return af.report.figure(af.masks.block_two_stream(3, 2), size=300)


def hasse() -> Any:
    """The Hasse diagram of the order that this mask generates."""
    return af.report.figure(af.order.analyze(af.masks.block_two_stream(3, 2)).hasse)


def packed() -> af.masks.Mask:
    """Two packed documents of six tokens. Each token reads itself and the two before it."""
    return af.masks.document([6, 6]) & af.masks.sliding_window(12, 3)


def window() -> Any:
    """This mask."""
    return af.report.figure(packed(), size=300)


def chains() -> Any:
    """Its order: what may reach what, through as many layers as it takes."""
    return af.report.figure(af.order.analyze(packed()).hasse)


def growth() -> Any:
    """How much of its past each token has read, layer after layer."""
    flow = af.order.analyze(af.masks.sliding_window(64, 8))
    return af.report.figure(flow, picture="growth")


def witness() -> Any:
    """Two documents of four tokens, one wrong pair, and the path that now leads from one document to the other."""
    mask = af.masks.document([4, 4]) & af.masks.sliding_window(8, 3)
    flow = af.order.analyze(mask | af.masks.from_edges([(4, 3)], 8))
    return af.report.figure(flow.hasse, highlight=flow.path(0, 6))


def objective(family: Any) -> Any:
    task = af.tasks.merge(family).task
    data = [token.provenance != frozenset() for token in task.inputs]
    labels = [f"{'' if is_data else '·'}{token.position}" for token, is_data in zip(task.inputs, data, strict=True)]
    return af.report.figure(task.mask, labels=labels, size=230)


def set_blocks() -> Any:
    """Set block decoding: a causal stream, and masked blocks that read it. Numbers are places, · is a [MASK]."""
    return objective(af.tasks.block_diffusion(range(1, 9), 4, None, 0, clean="causal", next_token=True))


def causal_blocks() -> Any:
    """The same with causal blocks (I-DLM)."""
    return objective(af.tasks.block_diffusion(range(1, 9), 4, None, 0, clean="causal", noisy="causal", next_token=True))


def canvas() -> Any:
    """Masked blocks behind a prompt of four tokens (DiffusionGemma)."""
    return objective(af.tasks.block_diffusion(range(1, 13), 4, None, 0, clean="causal", prompt=4))


def ahead() -> Any:
    """Two [MASK]s behind each token, which predict the tokens after the next."""
    return objective(af.tasks.look_ahead(range(1, 8), 3, 0))


def gists() -> Any:
    """Two answers that read a context of six tokens through two gist tokens alone."""
    return objective(af.tasks.gist(range(1, 7), [[7, 8, 9], [10, 11, 12]], 2, 0))


def rollouts() -> Any:
    """Three responses to a prompt of four tokens, as the tree of their prefixes."""
    return objective(af.tasks.rollouts(range(1, 5), [[5, 6, 7], [5, 8, 9], [10, 11]]))


def gap() -> Any:
    """A gap that is read from both sides: a task of the family Butterfly."""
    task = af.tasks.butterfly(range(12), block=4, mask_token=99)[1]
    labels = ["[M]" if token.ids == (99,) else f"w{token.ids[0]}" for token in task.inputs]
    return af.report.figure(task.mask, labels=labels, size=300)


def tree() -> Any:
    """A prompt of three tokens and three completions that share it."""
    parents = [-1, 0, 1, 2, 3, 2, 5, 2, 7]
    labels = ["p1", "p2", "p3", "a1", "a2", "b1", "b2", "c1", "c2"]
    return af.report.figure(af.order.analyze(af.masks.tree(parents)).hasse, labels=labels)


def measured() -> Any:
    """What each layer of a small Mistral with a window of 4 really lets its tokens read."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
    flow = af.audit.measure(MistralForCausalLM(config), torch.arange(12)[None])
    return af.report.figure(flow.masks[0], size=300)


def audit() -> Any:
    """An audit of SmolLM2 with a fault: one norm that takes the mean over the sequence."""
    loaded = af.load_model("smollm2-135m")
    norm: Any = loaded.model.get_submodule("model.layers.12.post_attention_layernorm")
    norm.register_forward_hook(lambda module, inputs, output: output + 0.1 * output.mean(1, keepdim=True))
    return af.report.figure(af.audit.check(loaded, af.models.sample_text("sonnets", 120), passes=8))


def bias() -> Any:
    """What a bias adds to the scores of SmolLM2 after a few steps of training."""
    loaded = af.load_model("smollm2-135m")
    af.bias.attach(loaded, af.bias.GuidanceConfig(), train="guidance")
    ids = loaded.tokenizer(af.models.sample_text("sonnets", 6000), return_tensors="pt")["input_ids"][0]
    rows = [{"input_ids": row, "labels": row} for row in ids.split(128)[:-1]]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no", report_to="none"
        )
        Trainer(loaded.model, options, train_dataset=rows).train()
    return af.report.figure(af.bias.capture(loaded, SUM), layer=14)


def plane() -> Any:
    """Symmetry and directionality of two models, between those that were published."""
    return af.report.figure(
        *(af.geometry.score(name, per_head=False, fold=False) for name in ("smollm2-135m", "minilm"))
    )


def why() -> Any:
    """Why a head of SmolLM2 looked at a name: pairs of components, the leading terms, and the tokens of the row."""
    text = "When Mary and John went to the store, John gave a drink to"
    result = af.geometry.attribute(af.load_model("smollm2-135m"), text, layer=24, head=4)
    return af.report.figure(replace(result, model="SmolLM2"), count=6)


def trace() -> Any:
    """Which feed-forward entries fired for a text, and what they did to the logit of the next token."""
    result = af.knowledge.trace(af.load_model("smollm2-135m"), "The capital of France is", ablate=12)
    return af.report.figure(replace(result, model="SmolLM2"))


def flow() -> Any:
    """Who told SmolLM2 an answer: heads that carry it from token to token, and entries."""
    text = "When Mary and John went to the store, John gave a drink to"
    result = af.explain.answer(af.load_model("smollm2-135m"), text, " Mary", against=" John")
    return af.report.figure(replace(result, model="SmolLM2"))


def page() -> Any:
    """A page of `af.report.page` in a browser, once light and once dark, in one file."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    shots: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tools:
        path = af.report.page(packed(), title="Two packed documents").save(Path(folder) / "page.html")
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_context(viewport={"width": 900, "height": 700}, color_scheme=scheme).new_page()
            tab.goto(path.as_uri())
            shot, small = Image.open(io.BytesIO(tab.screenshot())).convert("RGB"), io.BytesIO()
            shot.save(small, "webp", quality=45, method=6)
            shots[scheme] = base64.b64encode(small.getvalue()).decode()
        browser.close()
    hide = ".dark{display:none}@media (prefers-color-scheme:dark){.dark{display:inline}.light{display:none}}"
    images = "".join(
        f'<image class="{scheme}" width="900" height="700" href="data:image/webp;base64,{data}"/>'
        for scheme, data in shots.items()
    )
    size = 'viewBox="0 0 900 700" width="900" height="700"'
    return Svg(f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{hide}</style>{images}</svg>')


def terminal() -> Any:
    """What the command line prints, in a dark window of its own."""
    command = ["attnflow", "mask", "show", "butterfly", "--n", "5"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    console = Console(record=True, width=84, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(command)}", style="bold"))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    drawing = console.export_svg(title="attnflow")
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)  # a page loads nothing from elsewhere
    return Svg(re.sub(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', r'\g<0> width="\1" height="\2"', drawing, count=1))


BACKGROUND = re.compile(r":root\.af-page\{background.*?\}")  # of the whole drawing
PICTURES: tuple[Callable[[], Any], ...] = (
    mask, hasse, window, chains, growth, witness, gap, set_blocks, causal_blocks, canvas, ahead, gists, rollouts,
    tree, measured, audit, bias, plane, why, trace, flow, page, terminal,
)  # fmt: skip


def encoded(picture: Any, what: str) -> str:
    """A drawing as a file, with colours for light and for dark pages, whose own background shows through."""
    return BACKGROUND.sub("", (picture if isinstance(picture, Svg) else standalone(svg_of(picture, what))).markup)


def main() -> None:
    """Draw what is missing, what is named, or all."""
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        path = FOLDER / f"{draw.__name__}.svg"
        if {"--all", draw.__name__} & {*sys.argv} or not (path.exists() or sys.argv[1:]):
            path.write_text(encoded(draw(), (draw.__doc__ or "").partition("\n")[0]))
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
