"""The scripts of docs/guides/parallel.md under torchrun: clean as they are, and with a fault that they find."""

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, torchrun

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples" / "parallel"
GUIDE = (ROOT / "docs" / "guides" / "parallel.md").read_text()
# {script: (printed where it is clean, printed with the planted fault)}
PRINTED = {
    "audit_fsdp2_step": (
        [r"^clean: causal\(n=24\); 4 x 24 positions", r"^rank 1: step 2, loss 4\.", r"^rank 1: guard of .*: no leak"],
        [r"^LEAK: causal", r"^order: step: position \d+ moves with position \d+ .* of rank \d, \d+ of rank \d\)"],
    ),
    "audit_context_parallel_step": (
        [r"^clean: causal\(n=32\); 2 x 32 positions", r"^rank 1: 16 of 32 positions, loss 4\."],
        [r"^LEAK: causal", r"^order: step: .*of rank 1, \d+ of rank 0\)", r"^reference: step.logits: differs"],
    ),
    "share_prefixes_trl_ddp": (
        [r"^guard of .*: no leak; \d+ of 18 calls audited", r"^rank 1: 128 tokens in the last batch, 56 after sharing"],
        [r"^rank 0: RankFailed: rank 1: order: ", r"^rank 1: LeakFound: order: "],
    ),
}


@pytest.fixture(scope="module", params=[(name, leak) for name in PRINTED for leak in (False, True)], ids=str)
def launch(request):
    name, leak = request.param
    return name, leak, torchrun(str(FOLDER / f"{name}.py"), *(["--leak"] if leak else []), timeout=240)


def test_a_script_is_clean_and_finds_its_fault(launch):
    name, leak, done = launch
    assert done.returncode == leak, done.stderr[-3000:]
    for pattern in PRINTED[name][leak]:
        assert re.search(pattern, done.stdout, re.MULTILINE), f"{pattern}\n{done.stdout}"
    codes = re.findall(r"^ +exitcode +: (-?\d+)", done.stderr, re.MULTILINE)
    assert ("1" in codes) == leak
    if name.startswith("share") and not leak:
        steps = re.findall(r"(\S+) and (\S+) shared", done.stdout)
        assert len(steps) == 4
        for one, two in steps:
            assert float(two) == pytest.approx(float(one), rel=1e-3)


def test_each_rank_states_its_memory_as_the_guide_does(launch):
    _, leak, done = launch
    if leak:  # it ends before its last step, which leaves the parameters as they are stored
        return
    found = re.findall(r"^rank (\d): .*?([\d,]+) of ([\d,]+) parameters, peak ([\d,]+) MiB", done.stdout, re.MULTILINE)
    assert [rank for rank, *_ in found] == ["0", "1"]
    for _, held, whole, peak in found:
        assert f"| {held} of {whole} |" in GUIDE, "the guide's table of memory"
        assert 100 < int(peak.replace(",", "")) < 4000


def test_the_folder_has_no_other_script():
    assert {path.stem for path in Path(FOLDER).glob("*.py")} == {*PRINTED, "ranks"}
