"""The models that packages ship, and what each of them reads."""

from __future__ import annotations

import re
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from attnflow.models import MODELS, load_model, sample_text
from attnflow.models.loading.names import Packaged
from experiments.geometry_checkpoints.checkpoints import ctranslate2, shipped
from experiments.runner.text import TEST

UNTRAINED: Final = "random"  # a Llama of random weights that reads random tokens, for dry runs
SPEECH: Final = (
    Packaged("pyannote-audio==4.0.7", "pyannote", "audio/sample/sample.wav", "half a minute of a conversation"),
    Packaged("useful-moonshine-onnx==20251121", "moonshine_onnx", "assets/beckett.wav", "ten seconds read aloud"),
)
_RATE: Final = 16_000
_CLIP: Final = 78_400  # samples of a clip, 4.9 seconds; the encoder reads 30, and the rest is silence
_FRAME: Final = 320  # samples of one position of the encoder
_START: Final = (50257, 50362)  # of what Whisper tiny.en writes: begin, without times
_END: Final = 50256
# Variable regions as they are published: trastuzumab, adalimumab and rituximab, heavy and light; the heavy chain of
# pembrolizumab and the light one of nivolumab.
ANTIBODIES: Final = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
    "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
    "QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQWTSNPPTFGGGTKLEIK",
    "QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS",
    "EIVLTQSPATLSLSPGERATLSCRASQSVSSYLAWYQQKPGQAPRLLIYDASNRATGIPARFSGSGSGTDFTLTISSLEPEDFAVYYCQQSSNWPRTFGQGTKVEIK",
)
_PLACES: Final = {  # of CTranslate2, with the names of transformers
    r"(encoder|decoder)/layer_(\d+)/self_attention": r"model.\1.layers.\2.self_attn",
    r"(encoder|decoder)/layer_(\d+)/attention": r"model.\1.layers.\2.encoder_attn",
    r"(encoder|decoder)/layer_(\d+)/ffn/linear_0": r"model.\1.layers.\2.fc1",
    r"(encoder|decoder)/layer_(\d+)/ffn/linear_1": r"model.\1.layers.\2.fc2",
    r"(encoder|decoder)/layer_(\d+)/ffn/layer_norm": r"model.\1.layers.\2.final_layer_norm",
    r"encoder/conv(\d)": r"model.encoder.conv\1",
    r"(encoder|decoder)/layer_norm": r"model.\1.layer_norm",
}


@dataclass(frozen=True)
class Reading:
    model: PreTrainedModel  # of transformers
    texts: Sequence[Mapping[str, Tensor]]  # its named inputs, one sequence each
    # tower -> how many tokens at the beginning and at the end are marks, or the first one, which often draws the
    # attention of all others
    ends: Mapping[str, tuple[int, int]]
    # tower -> how many tokens at the end are silence, which the model reads and which are never counted
    pads: Mapping[str, int] = field(default_factory=dict[str, int])
    says: tuple[str, ...] = ()  # what it has made of its inputs, where that shows that the weights are in their places

    def size(self, tower: str) -> int:
        name = {"encoder": "input_features", "decoder": "decoder_input_ids"}.get(tower, "input_ids")
        frames = 2 if tower == "encoder" else 1  # of a position
        return round(float(np.mean([text[name].shape[-1] for text in self.texts])) / frames) - self.pads.get(tower, 0)


def needed(name: str) -> tuple[Packaged, ...]:
    """The packages of a model and of what it reads; its text is Shakespeare's where nothing else is said."""
    if name == UNTRAINED:
        return ()
    if name in ("SmolLM2", "MiniLM"):
        return (MODELS[{"SmolLM2": "smollm2-135m", "MiniLM": "minilm"}[name]],)
    packaged = shipped()[name].packaged
    assert packaged is not None
    return (packaged, *(SPEECH if name == "Whisper" else ()))


def read(name: str, count: int, tokens: int) -> Reading:
    """A model with `count` texts of `tokens` tokens; whole chains for AntiBERTy, clips of sound for Whisper."""
    if name == "AntiBERTy":
        return antiberty(count)
    if name == "Whisper":
        return whisper(count)
    if name == UNTRAINED:
        return untrained(count, tokens)
    loaded = load_model({"SmolLM2": "smollm2-135m", "MiniLM": "minilm"}[name], dtype="float32")
    tokenizer: Any = loaded.tokenizer
    marks = 2 if name == "MiniLM" else 0  # [CLS] and [SEP] stay when a text is cut
    texts: list[dict[str, Tensor]] = []
    for work in TEST[:count]:
        ids = tokenizer(excerpt(work), add_special_tokens=False, verbose=False)["input_ids"][: tokens - marks]
        assert len(ids) == tokens - marks, work
        if marks:
            ids = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
        texts.append({"input_ids": torch.tensor([ids])})
    return Reading(loaded.model, texts, {"": (1, 1 if marks else 0)})


def excerpt(work: str) -> str:
    """Two thousand letters from the speech in the middle of a work on."""
    speeches = [part.strip() for part in re.split(r"\n\s*\n", sample_text(work)) if part.strip()]
    return "\n\n".join(speeches[len(speeches) // 2 :])[:2000]


def untrained(count: int, tokens: int) -> Reading:
    """A tiny Llama with grouped heads and random weights, and random tokens."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaModel(config).eval()
        texts = [{"input_ids": torch.randint(50, (1, tokens))} for _ in range(count)]
    return Reading(model, texts, {"": (1, 0)})


def antiberty(count: int) -> Reading:
    """AntiBERTy, whose weights are read as tensors alone, and chains of antibodies."""
    folder = needed("AntiBERTy")[0].path()
    model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False).eval()
    stored = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    own = {name.removeprefix("bert."): value for name, value in stored.items() if name.startswith("bert.")}
    model.load_state_dict({name: value for name, value in own.items() if name in model.state_dict()})
    letters = (folder.parent / "vocab.txt").read_text(encoding="utf-8").split()
    texts = [
        {"input_ids": torch.tensor([[letters.index(one) for one in ("[CLS]", *chain, "[SEP]")]])}
        for chain in ANTIBODIES[:count]
    ]
    return Reading(model, texts, {"": (1, 1)})


def whisper(count: int) -> Reading:
    """Whisper tiny.en on clips of speech; its decoder reads what the model itself has written of them."""
    folder = needed("Whisper")[0].path()
    model = whisper_of(ctranslate2((folder / "model.bin").read_bytes()))
    listen = WhisperFeatureExtractor(feature_size=80)
    texts: list[dict[str, Tensor]] = []
    says: list[str] = []
    for clip in islice((clip for one in SPEECH for clip in clips(one.path())), count):
        features = cast(Any, listen)(clip, sampling_rate=_RATE, return_tensors="pt")["input_features"]
        written = transcribed(model, features)
        says.append(spelled(folder / "vocabulary.txt", written))
        texts.append({"input_features": features, "decoder_input_ids": torch.tensor([written])})
    silence = model.config.max_source_positions - _CLIP // _FRAME
    return Reading(model, texts, {"encoder": (1, 0), "decoder": (len(_START), 0)}, {"encoder": silence}, tuple(says))


def whisper_of(variables: Mapping[str, Tensor]) -> WhisperForConditionalGeneration:
    """Whisper tiny.en from the variables of CTranslate2."""
    tensors: dict[str, Tensor] = {}
    for name, value in variables.items():
        place, what = name.rpartition("/")[::2]
        what = {"gamma": "weight", "beta": "bias"}.get(what, what)
        for pattern, own in _PLACES.items():
            found = re.match(pattern, place)
            if found is None:
                continue
            rest = place[found.end() :].strip("/")
            tensors |= _parts(found.expand(own), rest, what, value.float())
            break
    tensors["model.encoder.embed_positions.weight"] = variables["encoder/position_encodings/encodings"]
    tensors["model.decoder.embed_positions.weight"] = variables["decoder/position_encodings/encodings"]
    tensors["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"]
    words, width = tensors["proj_out.weight"].shape
    config = WhisperConfig(
        vocab_size=words, d_model=width, encoder_layers=4, decoder_layers=4,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, decoder_start_token_id=_START[0], eos_token_id=_END, bos_token_id=_END,
        pad_token_id=_END,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return model


def _parts(place: str, rest: str, what: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors of transformers that one variable of CTranslate2 holds."""
    norm = {"self_attn": "self_attn_layer_norm", "encoder_attn": "encoder_attn_layer_norm"}
    module = place.rpartition(".")[2]
    if module not in norm:
        return {f"{place}.{what}": value}
    if rest == "layer_norm":
        return {f"{place.rpartition('.')[0]}.{norm[module]}.{what}": value}
    fused = {
        ("self_attn", "linear_0"): ("q_proj", "k_proj", "v_proj"),
        ("self_attn", "linear_1"): ("out_proj",),
        ("encoder_attn", "linear_0"): ("q_proj",),
        ("encoder_attn", "linear_1"): ("k_proj", "v_proj"),
        ("encoder_attn", "linear_2"): ("out_proj",),
    }[module, rest]
    named = zip(fused, value.chunk(len(fused)), strict=True)
    return {f"{place}.{name}.{what}": part for name, part in named if (name, what) != ("k_proj", "bias")}


def clips(path: Path) -> list[Any]:
    """Clips of a sound file of 16 bits and 16 kHz, one behind the other."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (_RATE, 2, 1), path
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(32768)
    return [sound[at : at + _CLIP] for at in range(0, len(sound) - _CLIP + 1, _CLIP)]


@torch.no_grad()
def transcribed(model: WhisperForConditionalGeneration, features: Tensor) -> list[int]:
    heard = model.model.encoder(features)
    written: list[int] = [*_START]
    while len(written) < 60:
        logits = model(encoder_outputs=heard, decoder_input_ids=torch.tensor([written])).logits[0, -1]
        logits[_END + 1 :] = -torch.inf  # only words
        token = int(logits.argmax())
        if token == _END:
            break
        written.append(token)
    return written


def spelled(vocabulary: Path, tokens: Sequence[int]) -> str:
    pieces = vocabulary.read_text(encoding="utf-8").split("\n")
    return "".join(pieces[token] for token in tokens[len(_START) :]).replace("\u0120", " ").strip()
