"""Tries a wheel in clean environments: alone and with each extra. `python tests/release_smoke.py WHEEL [EXTRA ...]`.

`light` is the wheel without extras. Needs no installation of attnflow, and ends with 1 at the first failure.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

LIGHT = """
import attnflow as af
flow = af.order.analyze(af.masks.document([3, 3]))
assert flow.depth == 1 and not flow.path(0, 4), flow
"""
SMOKE = {
    "light": LIGHT
    + """
try:
    af.load_model("gpt2")
    raise SystemExit("transformers came along")
except af.MissingExtra as error:
    assert "attnflow[hf]" in str(error)
""",
    "hf": """
import torch, attnflow as af
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
assert af.audit.check(LlamaForCausalLM(LlamaConfig(**sizes)), torch.arange(5, 13)[None]).ok
""",
    "knowledge": """
import attnflow as af
with af.knowledge.Store.open("memory", dim=2) as store:
    assert store.insert(embeddings=[[1.0, 0.0], [0.0, 1.0]]).tolist() == [0, 1]
""",
    "report": """
import attnflow as af
af.report.page(af.order.analyze(af.masks.causal(4))).save("page.html")
import matplotlib
""",
    "studio": "import attnflow.studio, starlette, uvicorn, websockets",
    "trl": "import attnflow as af, trl; af.audit.GuardCallback()",
    "test": """
import pathlib, subprocess, sys
pathlib.Path("test_one.py").write_text(
    "import attnflow as af\\ndef test_one(assert_same_mask): assert_same_mask(*2 * [af.masks.causal(4)])\\n"
)
sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "test_one.py"]).returncode)
""",
    "all": LIGHT
    + """
import importlib.metadata, os
large = ("torch", "triton", "nvidia", "cuda")  # which build of PyTorch came is not ours to say
parts = [part for part in importlib.metadata.distributions() if not part.name.startswith(large)]
files = {file.locate() for part in parts for file in part.files or ()}
size = sum(os.path.getsize(file) for file in files if os.path.exists(file))
assert size < 1.1e9, f"{size / 1e9:.2f} GB beside PyTorch"
""",
}


def smoke(wheel: Path, extra: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        venv.create(Path(place) / "venv", with_pip=True)
        python = next(path for path in (Path(place) / "venv").glob("*/python*") if path.stem == "python")
        requirement = str(wheel) if extra == "light" else f"{wheel}[{extra}]"
        pins = Path(__file__).resolve().parents[1] / "constraints.txt"
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins, requirement]
        subprocess.run(command, check=True)
        subprocess.run([python, "-m", "attnflow", "--version"], check=True, cwd=place)
        subprocess.run([python, "-I", "-c", SMOKE[extra]], check=True, cwd=place)
    print(f"{extra}: works", flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or SMOKE:
        smoke(Path(sys.argv[1]).resolve(), name)
