"""Networks that other people wrote, with random weights: those of `transformers`, which is an extra, and four of ours.

Sizes are those of small models: width 256, two layers, 64 tokens or images of 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, WIDTH, IMAGE = 1000, 64, 256, 64
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Network:
    """make: the module, whose first result is a tensor. inputs: those of a batch, by the names of parameters."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]


class FirstResult(nn.Module):
    """A model of `transformers` that gives the first of its results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**inputs, return_dict=False)[0]
        return found


class Convolutions(nn.Sequential):
    """Two convolutions, each followed by a batch norm and a ReLU."""

    def __init__(self, before: int, after: int) -> None:
        pairs = ((before, after), (after, after))
        super().__init__(
            *(f for a, b in pairs for f in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()))
        )


class UNet(nn.Module):
    """Three levels; the way up is a transposed convolution and the features of the way down."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip((3, 16, 32), widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ((64, 32), (32, 16)))
        self.merge = nn.ModuleList(Convolutions(a, b) for a, b in ((64, 32), (32, 16)))
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            x = level(x if not kept else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, other in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([up(x), other], 1))
        found: Tensor = self.head(x)
        return found


class Mixer(nn.Module):
    """Four blocks of an MLP-Mixer over patches of 8 x 8."""

    class Block(nn.Module):
        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(nn.Linear(tokens, 128), nn.GELU(), nn.Linear(128, tokens))
            self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.second(x))

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.blocks = nn.Sequential(*(self.Block((IMAGE // 8) ** 2, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return found


class GraphAttention(nn.Module):
    """Two layers of attention over the edges of a graph, whose sums are `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, 64) for n in (32, 64))
        self.scores = nn.ModuleList(nn.Linear(128, 1) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            weight = nn.functional.leaky_relu(score(torch.cat([h[source], h[target]], 1)), 0.2).exp()
            total = torch.zeros(len(x), 1, dtype=h.dtype).index_add(0, target, weight.to(h.dtype))
            x = torch.zeros_like(h).index_add(0, target, (weight * h[source]).to(h.dtype)) / (total[:, :1] + 1e-6)
            x = nn.functional.elu(x)
        return x


class Recurrent(nn.Module):
    """16 steps of two LSTM cells, as a loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(n, WIDTH) for n in (64, WIDTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state, steps = None, []
            for step in x.unbind(1):
                state = cell(step, state)
                steps.append(state[0])
            x = torch.stack(steps, 1)
        found: Tensor = self.head(x[:, -1])
        return found


def _tokens(batch: int) -> Inputs:
    return {"input_ids": torch.randint(VOCABULARY, (batch, TOKENS))}


def _masked_tokens(batch: int) -> Inputs:
    """Sequences of several lengths, as a tokenizer pads them."""
    lengths = torch.linspace(TOKENS, TOKENS // 2, batch).long()
    return {**_tokens(batch), "attention_mask": (torch.arange(TOKENS) < lengths[:, None]).long()}


def _pairs(batch: int) -> Inputs:
    return {**_tokens(batch), "decoder_input_ids": torch.randint(VOCABULARY, (batch, TOKENS // 2))}


def _pixels(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE)}


def _image(batch: int) -> Inputs:
    return {"x": torch.randn(batch, 3, IMAGE, IMAGE)}


def _graph(batch: int) -> Inputs:
    nodes = 500 * batch
    return {"x": torch.randn(nodes, 32), "edges": torch.randint(nodes, (2, 8 * nodes))}


def _from_transformers(model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{model.removesuffix('Model')}Config")(**sizes)
        return FirstResult(getattr(transformers, model)(config))

    return make


_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH,
}  # fmt: skip
_LLAMA = {**_BERT, "num_key_value_heads": 2, "max_position_embeddings": 256, "use_cache": False}
_VIT = {k: n for k, n in _BERT.items() if k != "vocab_size"} | {"image_size": IMAGE, "patch_size": 8}
_DECODER = {"vocab_size": VOCABULARY, "use_cache": False}
_hf = _from_transformers

NETWORKS: Mapping[str, Network] = {
    "bert": Network(_hf("BertModel", **_BERT), _masked_tokens),
    "roberta": Network(_hf("RobertaModel", **_BERT), _tokens),
    "electra": Network(_hf("ElectraModel", embedding_size=128, **_BERT), _masked_tokens),
    "albert": Network(_hf("AlbertModel", embedding_size=128, **_BERT), _tokens),
    "distilbert": Network(
        _hf("DistilBertModel", vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=2, n_heads=4), _tokens
    ),
    "gpt2": Network(_hf("GPT2Model", n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, **_DECODER),
                    _tokens),
    "opt": Network(_hf("OPTModel", hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
                       word_embed_proj_dim=WIDTH, **_DECODER), _tokens),
    "gpt_neox": Network(_hf("GPTNeoXModel", use_cache=False, **_BERT), _tokens),
    "bloom": Network(_hf("BloomModel", hidden_size=WIDTH, n_layer=2, n_head=4, **_DECODER), _tokens),
    "llama": Network(_hf("LlamaModel", **_LLAMA), _tokens),
    "mistral": Network(_hf("MistralModel", sliding_window=32, **_LLAMA), _tokens),
    "qwen2": Network(_hf("Qwen2Model", **_LLAMA), _tokens),
    "gemma": Network(_hf("GemmaModel", head_dim=64, **_LLAMA), _tokens),
    "phi": Network(_hf("PhiModel", **_LLAMA | {"num_key_value_heads": 4}), _tokens),
    "t5": Network(_hf("T5Model", d_model=WIDTH, d_kv=64, d_ff=4 * WIDTH, num_layers=2, num_heads=4, **_DECODER),
                  _pairs),
    "bart": Network(_hf("BartModel", d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH,
                        **_DECODER), _pairs),
    "vit": Network(_hf("ViTModel", **_VIT), _pixels),
    "deit": Network(_hf("DeiTModel", **_VIT), _pixels),
    "dinov2": Network(_hf("Dinov2Model", **_VIT), _pixels),
    "swin": Network(_hf("SwinModel", image_size=IMAGE, patch_size=4, embed_dim=48, depths=[2, 2], num_heads=[2, 4],
                        window_size=4), _pixels),
    "convnext": Network(_hf("ConvNextModel", hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3), _pixels),
    "resnet": Network(_hf("ResNetModel", embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2],
                          layer_type="basic"), _pixels),
    "regnet": Network(_hf("RegNetModel", embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 2, 2],
                          groups_width=16), _pixels),
    "mobilenet_v2": Network(_hf("MobileNetV2Model", image_size=IMAGE, depth_multiplier=0.5), _pixels),
    "segformer": Network(_hf("SegformerModel", image_size=IMAGE, hidden_sizes=[16, 32, 64, 128],
                             depths=[1, 1, 1, 1]), _pixels),
    "poolformer": Network(_hf("PoolFormerModel", hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1]), _pixels),
    "unet": Network(UNet, _image),
    "mixer": Network(Mixer, _image),
    "graph_attention": Network(GraphAttention, _graph),
    "lstm": Network(Recurrent, lambda batch: {"x": torch.randn(batch, 16, 64)}),
}  # fmt: skip


def make_network(name: str, seed: int = 0) -> nn.Module:
    """The network of a name, the same one for each seed. Raises ImportError if it needs `transformers`, an extra."""
    torch.manual_seed(seed)
    return NETWORKS[name].make()
