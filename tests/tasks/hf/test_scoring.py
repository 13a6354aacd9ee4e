"""Scores of continuations: the numbers of one request at a time, and of lm-eval's own model."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.models.passes.evaluation import precision
from attnflow.models.subject import Subject
from attnflow.tasks.embedding import run
from tests.audit.packing import EOS, PAD, WORDS, texts, tokenizer
from tests.models import CAUSAL, ZOO, tiny

SHOTS = [5, 6, 7, 8, 9, 10, 11, 12]
CHOICES = [[20, 21], [20, 22, 23], [24], [25], [20, 21]]
REQUESTS = [([*SHOTS, *question], choice) for question, choice in product([[13, 14], [13], [15, 16, 17]], CHOICES)]
REQUESTS += [([40, 41], [42]), ([43], [44, 45])]


def alone(model, context, continuation):
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_probs = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)[len(context) - 1 :]
    value = log_probs.gather(1, torch.tensor(continuation)[:, None]).sum()
    return float(value), log_probs.argmax(-1).tolist() == list(continuation)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(set(CAUSAL) - {"OPT"}))
def test_scores_are_those_of_requests_alone(name, implementation):
    model = ZOO[name].build()
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{name} does not run with {implementation}")
    with precision(model, torch.float64):
        expected = [alone(model, *request) for request in REQUESTS]
        scores = af.tasks.score(model, REQUESTS)
    assert scores.log_probs == pytest.approx([value for value, _ in expected], rel=1e-9)
    assert list(scores.greedy) == [greedy for _, greedy in expected]
    assert scores.tokens_after < scores.tokens_before / 2


@pytest.mark.parametrize("tokens_per_pass", [1, 12, 20, 4096])
def test_passes_hold_so_many_tokens(tokens_per_pass):
    model = ZOO["Llama"].make()
    expected = [alone(model, *request)[0] for request in REQUESTS]
    seen = []
    hook = model.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(args[0].numel()))
    scores = af.tasks.score(model, REQUESTS, tokens_per_pass=tokens_per_pass)
    hook.remove()
    assert scores.log_probs == pytest.approx(expected, rel=1e-4)
    assert (scores.passes == 1) == (tokens_per_pass == 4096)
    assert all(len(context) + len(rest) - 1 <= max(tokens_per_pass, 13) for context, rest in REQUESTS)


def test_what_is_greedy_is_said():
    model = ZOO["Llama"].make()
    with torch.no_grad():
        best = model(torch.tensor([SHOTS])).logits[0, -1].argmax().item()
    scores = af.tasks.score(model, [(SHOTS, [best]), (SHOTS, [(best + 1) % 50])])
    assert scores.greedy == (True, False)
    assert scores.log_probs[0] > scores.log_probs[1]


def test_texts_are_read_as_lm_eval_reads_them():
    reader = tokenizer()
    model = CAUSAL["Llama"].make(vocab_size=WORDS + 4)
    loaded = af.models.subject.Loaded(model, reader)
    by_text = af.tasks.score(loaded, [("w1 w2 w3 ", "w4 w5"), ("w1 w2 w3", " w6")])
    ids = [(reader("w1 w2 w3")["input_ids"], reader(text)["input_ids"]) for text in ("w4 w5", "w6")]
    assert by_text == af.tasks.score(model, ids)


def test_scores_are_the_same_under_a_handle_of_share_prefixes():
    model = ZOO["Gemma3"].make()
    expected = af.tasks.score(model, REQUESTS)
    with af.tasks.share_prefixes(model):
        assert af.tasks.score(model, REQUESTS).log_probs == pytest.approx(expected.log_probs, rel=1e-5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_requests():
    scores = af.tasks.score(ZOO["Llama"].make(), [])
    assert (scores.log_probs, scores.passes, scores.tokens_before) == ((), 0, 0)


IDS = [3, 7, 11, 5, 2, 9]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen2"])
def test_two_sided_scores_are_those_of_each_token_alone(name):
    model = tiny(name)
    family = tasks.butterfly(IDS)
    with precision(model, torch.float64):
        scores = tasks.score(model, family).log_probs
        alone = [run(Subject(model), task).log_softmax(-1)[k, IDS[k]].detach() for k, task in enumerate(family)]
    assert torch.allclose(torch.tensor(scores, dtype=torch.float64), torch.stack(alone), rtol=1e-12, atol=0)
    assert tasks.score(model, tasks.merge(family)) == tasks.score(model, family)


def test_they_are_in_the_order_of_the_labels():
    model = tiny("Llama")
    spans = tasks.butterfly(IDS, block=2, mask_token=49)
    scores = tasks.score(model, spans).log_probs
    for number, task in enumerate(spans):
        own = run(Subject(model), task).log_softmax(-1)
        for label, score in zip(task.labels, scores[2 * number : 2 * number + 2], strict=True):
            assert float(score) == pytest.approx(float(own[label.position, label.target_id].detach()), rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval and of datasets
def test_the_numbers_of_lm_eval_on_a_task_file_of_its_own(tmp_path, monkeypatch):
    """hellaswag as it ships, five shots, its documents from a file here."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from experiments.evaluation.harness import SharedPrefixLM

    def document(number: int) -> dict[str, object]:
        parts = {"ctx_a": texts(1, number, 9, 12)[0], "ctx_b": texts(1, number + 50, 3, 4)[0], "ind": number}
        endings = texts(4, number + 100, 1, 6)
        return {**parts, "activity_label": f"w{number}", "endings": endings, "label": str(number % 4)}

    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(json.dumps(document(number)) for number in range(12)))
    shipped = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    (tmp_path / "local.yaml").write_text(
        f"include: {shipped}\ntask: hellaswag_here\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{train: {data}, validation: {data}}}, cache_dir: {tmp_path}}}\n"
    )
    torch.manual_seed(0)
    model = CAUSAL["Llama"].make(vocab_size=WORDS + 4, max_position_embeddings=512, pad_token_id=PAD, eos_token_id=EOS)
    answers, results = [], []
    for kind in (HFLM, SharedPrefixLM):
        host = kind(pretrained=model, tokenizer=tokenizer(), batch_size=8, device="cpu", max_length=116)
        output = lm_eval.simple_evaluate(
            model=host,
            tasks=["hellaswag_here"],
            task_manager=TaskManager(include_path=str(tmp_path)),
            num_fewshot=5,
            log_samples=True,
            bootstrap_iters=0,
        )
        results.append({k: v for k, v in output["results"]["hellaswag_here"].items() if k.startswith("acc")})
        answers.append([pair for s in output["samples"]["hellaswag_here"] for pair in s["filtered_resps"]])
    assert len(answers[0]) == len(answers[1]) == 48
    for (a, best), (b, greedy) in zip(*answers, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-5)
        assert best == greedy
    assert results[0] == results[1]
    assert host.tokens_after < 0.7 * host.tokens_before
