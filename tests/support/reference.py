"""The reference model: a GPT in one process, built from torch's own modules, sharing no code with nanodomino.

Every parallel layout is compared with this file, in float64. It must be simple enough to be obviously right:
`nn.Linear`, `nn.Embedding`, `nn.LayerNorm`, attention written out, one batch, one backward, `torch.optim.AdamW`. No
slices, no microbatches, no ranks. test_reference.py in turn compares it with torch's transformer.

The model is GPT-2's (Radford et al. 2019, section 2.3), as GPT-3 kept it. `config` is a resolved Config, of which only
the model's settings are read: numbers and names.

    x = word embedding + position embedding
    for each layer:  x = x + attention(norm(x))
                     x = x + mlp(norm(x))                mlp: linear, tanh-GELU, linear
    logits = head(final norm(x))                         only the first vocab_size rows of the padded head

A layer with experts has many MLPs. Here every expert computes every token, and the result of an expert that the token
did not choose is multiplied by 0. Nothing is sorted or sent.

If both sides made the same mistake, a comparison could not show it, so they differ on purpose. nanodomino keeps q, k
and v in one fused matrix with rows ordered [head, (q, k, v), head_dim], so that a contiguous cut gives whole heads:

    fused rows    | q of head 0 | k of head 0 | v of head 0 | q of head 1 | k of head 1 | ...
    here          three matrices of rows [head, head_dim]

Only `split_qkv` and `fuse_qkv` convert between the two layouts. Weights and gradients enter and leave as a dict of full
tensors, named as in nanodomino:

    embedding.word_embeddings.weight      [padded_vocab, h]    embedding.position_embeddings.weight  [max_positions, h]
    layers.{i}.attention.norm.weight, .bias          [h]       layers.{i}.mlp.norm.weight, .bias              [h]
    layers.{i}.attention.qkv.weight, .bias    [3h, h], [3h]    layers.{i}.mlp.dense_h_to_4h.weight, .bias  [f, h], [f]
    layers.{i}.attention.dense.weight, .bias   [h, h], [h]     layers.{i}.mlp.dense_4h_to_h.weight, .bias  [h, f], [h]
    final_norm.weight, .bias                         [h]       output_layer.weight  [padded_vocab, h], only when untied
    mtp.{d}.enorm.weight, .bias, also .hnorm         [h]       mtp.{d}.eh_proj.weight [h, 2h], mtp.{d}.layer.attention..

    in a layer with E experts of width w, each two matrices, with SwiGLU three, and perhaps a shared expert of width u:
    layers.{i}.mlp.router.weight                  [E, h]       layers.{i}.mlp.router.expert_bias                   [E]
    layers.{i}.mlp.experts.dense_h_to_4h       [E, w, h]       layers.{i}.mlp.experts.dense_4h_to_h          [E, h, w]
    layers.{i}.mlp.shared_expert.dense_h_to_4h.weight, .dense_4h_to_h.weight                            [u, h], [h, u]

b = batch, s = sequence, h = hidden, f = the MLP's inner width, n = heads, d = h / n.
"""

import hashlib
import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class StepRecord:
    """The results of one training step. gradients: before clipping, as full tensors in nanodomino's layout.

    statistics: for each depth the sum of its losses and their number; then, for each layer with experts, the tokens of
    each expert and the sum of the layer's losses.
    """

    loss: float
    gradients: dict
    gradient_norm: float
    statistics: list


# ---- conversion between the two layouts of q, k and v

def split_qkv(fused, num_groups, head_dim):
    """Rows [group, (its q's, k, v), head_dim] -> q with rows [head, head_dim], k and v with rows [group, head_dim]."""
    q, k, v = [], [], []
    for group in fused.chunk(num_groups):
        *queries, key, value = group.split(head_dim)
        q, k, v = q + queries, k + [key], v + [value]
    return torch.cat(q), torch.cat(k), torch.cat(v)


def fuse_qkv(q, k, v, num_groups):
    """The inverse of split_qkv."""
    return torch.cat([part for group in zip(q.chunk(num_groups), k.chunk(num_groups), v.chunk(num_groups))
                      for part in group])


def dim_of_parts(name, tensor):
    """Return the dimension along which a tensor's parts are joined: the rows, but the columns in a depth's merge.
    Experts are a stack of matrices."""
    return 1 if name.endswith("eh_proj.weight") else max(tensor.dim() - 2, 0)


# ---- the model

def norm_of(config, size=None):
    return getattr(nn, config.normalization)(size or config.hidden_size, eps=config.layernorm_epsilon)


def apply_mask(mask, site, x):
    """Multiply x by mask(site, shape), whose numbers are 0 or 1/(1-p). If mask is None, nothing is dropped."""
    return x * mask(site, tuple(x.shape)) if mask else x


def dropout_masks(seed, samples, hidden, attention, device):
    """Return the `mask` of ReferenceGPT.forward, drawn by the rule of nanodomino's masks: a mask is a function of
    (seed, sample, site, type of device) alone.

    samples: the numbers of the batch's samples in the data order. hidden, attention: the dropout rates. The first 8
    bytes of BLAKE2b("seed/sample/site"), little-endian and halved, seed the device's generator, which keeps an element
    with probability 1 - rate.
    """
    def mask(site, shape):
        rate = attention if site.endswith(".core") else hidden
        drawn = torch.empty(shape, dtype=torch.float64, device=device)
        for i, sample in enumerate(samples):
            digest = hashlib.blake2b(f"{seed}/{sample}/{site}".encode(), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") // 2)
            drawn[i].bernoulli_(1 - rate, generator=generator)
        return drawn.cpu() / (1 - rate)

    return mask


class Attention(nn.Module):
    """Causal self-attention, written out so that a dropout mask can be applied to the probabilities."""

    def __init__(self, config, site, window):
        super().__init__()
        self.site, self.window = site, window
        self.config, self.head_dim, bias = config, config.kv_channels, not config.disable_bias_linear
        self.norm = norm_of(config)
        heads, groups = config.num_attention_heads * self.head_dim, config.num_query_groups * self.head_dim
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, rows, bias=bias or config.add_qkv_bias)
                                  for rows in (heads, groups, groups))
        self.q_layernorm, self.k_layernorm = (norm_of(config, self.head_dim) if config.qk_layernorm else nn.Identity()
                                              for _ in range(2))
        self.dense = nn.Linear(heads, config.hidden_size, bias=bias)

    # [b, s, h] -> [b, s, h]; positions [b, s]; documents [b, s] or None
    def forward(self, x, mask, positions, documents):
        b, s, h = x.shape
        x = self.norm(x)
        q, k, v = (part(x).reshape(b, s, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        if self.config.position_embedding_type == "rope":
            q, k = rope(q, positions, self.config), rope(k, positions, self.config)
        k, v = (part.repeat_interleave(q.size(1) // part.size(1), dim=1) for part in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)  # [b, n, s, s]
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(diagonal=1).expand(b, s, s)
        if documents is not None:
            hidden = hidden | (documents[:, :, None] != documents[:, None, :])
        if self.window:
            place = torch.arange(s, device=x.device)
            hidden = hidden | (place[:, None] - place[None, :] > self.window)
        probabilities = torch.softmax(scores.masked_fill(hidden[:, None], -math.inf), dim=-1)
        probabilities = apply_mask(mask, f"{self.site}.core", probabilities)
        y = self.dense((probabilities @ v).transpose(1, 2).reshape(b, s, -1))
        return apply_mask(mask, f"{self.site}.hidden", y)


def rope(x, positions, config):
    """Rotate x [b, n, s, d]: each head's first numbers, as complex numbers (first half, second half), times
    exp(i angle). Angles are fp32 by definition."""
    size = int(config.kv_channels * config.rotary_percent)
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, size, 2).float() / size)
    frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    if config.use_rope_scaling:
        for i, frequency in enumerate(frequencies.tolist()):
            turns = 8192 * frequency / (2 * math.pi)  # full rotations within the original context length
            if turns < 1:
                frequencies[i] /= config.rope_scaling_factor
            elif turns < 4:
                smooth = (torch.tensor(8192) / (2 * math.pi / frequencies[i]) - 1) / 3
                frequencies[i] = (1 - smooth) * frequencies[i] / config.rope_scaling_factor + smooth * frequencies[i]
    angles = (positions.float()[..., None] * frequencies)[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = torch.complex(first, second) * torch.complex(angles.cos().double(), angles.sin().double())
    return torch.cat([turned.real, turned.imag, x[..., size:]], dim=-1)


def gelu_or_swiglu(gate, up):
    """Return the activation of up; with a gate, SwiGLU's silu(gate) x up."""
    return F.gelu(up, approximate="tanh") if gate is None else gate / (1 + torch.exp(-gate)) * up


class MLP(nn.Module):
    def __init__(self, config, site, width, has_norm=True):
        super().__init__()
        self.site, self.norm = site, norm_of(config) if has_norm else nn.Identity()
        h, bias = config.hidden_size, not config.disable_bias_linear
        self.gate = nn.Linear(h, width, bias=bias) if config.swiglu else None
        self.up, self.down = nn.Linear(h, width, bias=bias), nn.Linear(width, h, bias=bias)

    def forward(self, x, mask):  # [b, s, h] -> [b, s, h]
        x = self.norm(x)
        y = self.down(gelu_or_swiglu(self.gate and self.gate(x), self.up(x)))
        return apply_mask(mask, f"{self.site}.hidden", y)


class Experts(nn.Module):
    """The experts of a layer. forward leaves in routing_loss what is added to the token losses' sum, and in excess how
    often each expert was chosen, minus the mean, times E."""

    def __init__(self, config, site):
        super().__init__()
        self.site, self.config = site, config
        count, width, h = config.num_experts, config.moe_ffn_hidden_size, config.hidden_size
        self.norm, shared = norm_of(config), config.moe_shared_expert_intermediate_size
        self.shared_expert = MLP(config, site, shared, has_norm=False) if shared else None
        self.router = nn.Linear(h, count, bias=False)
        self.router.register_buffer("expert_bias", torch.zeros(count) if config.moe_router_enable_expert_bias else None)
        self.experts = nn.Module()
        self.experts.gate = nn.Parameter(torch.zeros(count, width, h)) if config.swiglu else None
        self.experts.up = nn.Parameter(torch.zeros(count, width, h))
        self.experts.down = nn.Parameter(torch.zeros(count, h, width))

    def forward(self, x, mask):  # [b, s, h] -> [b, s, h]
        config, x = self.config, self.norm(x)
        logits = self.router(x)  # [b, s, E]
        scores = {"softmax": torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True),
                  "sigmoid": 1 / (1 + torch.exp(-logits))}[config.moe_router_score_function]
        chosen = self.choose(scores.detach())
        self.routing_loss = self.losses(logits, scores, chosen)
        total = chosen.sum((0, 1))
        self.excess = config.num_experts * total - total.sum()
        self.statistics = [*total.tolist(), self.routing_loss.item()]
        weights = self.weights(logits, scores, chosen)
        y = torch.zeros_like(x)
        for e in range(config.num_experts):
            gate = None if self.experts.gate is None else x @ self.experts.gate[e].T
            wide = gelu_or_swiglu(gate, x @ self.experts.up[e].T)
            y = y + weights[..., e, None] * (wide @ self.experts.down[e].T)
        if self.shared_expert:
            y = y + self.shared_expert(x, None)
        return apply_mask(mask, f"{self.site}.hidden", y)

    def choose(self, scores):
        """Return [b, s, E]: 1 for the topk experts of each token, else 0. argmax takes the first of equal scores."""
        scores = scores if self.router.expert_bias is None else scores + self.router.expert_bias
        chosen = torch.zeros_like(scores)
        for _ in range(self.config.moe_router_topk):
            best = scores.masked_fill(chosen > 0, -math.inf).argmax(-1, keepdim=True)
            chosen = chosen.scatter(-1, best, 1.0)
        return chosen

    def weights(self, logits, scores, chosen):
        """Return the weight of each expert [b, s, E], 0 unless the token chose it."""
        config, softmax = self.config, self.config.moe_router_score_function == "softmax"
        of_the_chosen = not config.moe_router_pre_softmax if softmax else config.moe_router_topk > 1
        weights = chosen * (torch.exp(logits) if softmax and of_the_chosen else scores)
        if of_the_chosen:
            weights = weights / weights.sum(-1, keepdim=True)
        return config.moe_router_topk_scaling_factor * weights

    def losses(self, logits, scores, chosen):
        """Return auxiliary loss + z-loss: a sum over samples, in which a sample of s tokens counts s times."""
        config, total = self.config, 0.0
        probabilities = scores / scores.sum(-1, keepdim=True)
        for own_logits, own_probabilities, own_chosen in zip(logits, probabilities, chosen):  # one sample, [s, E] each
            s = len(own_logits)
            shares, means = own_chosen.sum(0) / (s * config.moe_router_topk), own_probabilities.sum(0) / s
            total = total + s * config.moe_aux_loss_coeff * config.num_experts * (shares * means).sum()
            total = total + config.moe_z_loss_coeff * (torch.log(torch.exp(own_logits).sum(-1)) ** 2).sum()
        return total


class Layer(nn.Module):
    """Layer i of the model and its depths, counted from 0; the depths' layers follow the last."""

    def __init__(self, config, i, site):
        super().__init__()
        has_experts = config.num_experts and i % config.moe_layer_freq == 0
        window = config.window_size if i >= config.full_attention_layers else None
        self.attention = Attention(config, f"{site}.attention", window)
        self.mlp = Experts(config, f"{site}.mlp") if has_experts else MLP(config, f"{site}.mlp", config.ffn_hidden_size)

    def forward(self, x, mask, positions, documents):  # [b, s, h] -> [b, s, h]
        x = x + self.attention(x, mask, positions, documents)
        return x + self.mlp(x, mask)


class Depth(nn.Module):
    """Depth d of multi-token prediction (2412.19437, section 2.2, equations 21 to 23): merges what the previous depth
    made of token i with the embedding of token i + d. The two halves of its matrix are two matrices here."""

    def __init__(self, config, d):
        super().__init__()
        self.layer = Layer(config, config.num_layers + d, f"mtp.{d}.layer")
        self.enorm, self.hnorm = norm_of(config), norm_of(config)
        self.from_words, self.from_hidden = (nn.Linear(config.hidden_size, config.hidden_size, bias=False)
                                             for _ in range(2))

    def forward(self, words, x, mask, positions, documents):  # [b, s, h] -> [b, s, h]
        return self.layer(self.from_words(self.enorm(words)) + self.from_hidden(self.hnorm(x)), mask, positions,
                          documents)


# What is one tensor in nanodomino and several here; the rest has the same name.
FUSED = {".q.": ".qkv.", ".k.": ".qkv.", ".v.": ".qkv.", ".gate": ".dense_h_to_4h", ".up": ".dense_h_to_4h",
         ".down": ".dense_4h_to_h", ".from_words": ".eh_proj", ".from_hidden": ".eh_proj"}


class ReferenceGPT(nn.Module):
    """`ReferenceGPT(config).double()`, then `load_full(weights)`; torch's own initial weights until then."""

    def __init__(self, config):
        super().__init__()
        self.config, h = config, config.hidden_size
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(config.padded_vocab_size, h)
        if config.position_embedding_type == "learned_absolute":
            self.embedding.position_embeddings = nn.Embedding(config.max_position_embeddings, h)
        self.layers = nn.ModuleList(Layer(config, i, f"layers.{i}") for i in range(config.num_layers))
        self.mtp = nn.ModuleList(Depth(config, d) for d in range(config.mtp_num_layers))
        self.final_norm = norm_of(config)
        self.output_layer = None if config.tied else nn.Linear(h, config.padded_vocab_size, bias=False)

    def forward(self, tokens, positions=None, documents=None, mask=None):
        """tokens [b, s] -> logits [b, s, vocab_size]. positions [b, s] or [s]; None: 0, 1, ... documents [b, s], if
        given: a token does not attend to other documents.

        `mask(site, shape)`, if given, returns the dropout mask of a site, scaled by 1/(1-p). Sites in order:
        "embedding" [b, s, h]; then in each layer i "layers.{i}.attention.core" [b, n, s, s] on the probabilities,
        "layers.{i}.attention.hidden" and "layers.{i}.mlp.hidden" [b, s, h] on what is added to x.
        """
        positions = (torch.arange(tokens.size(1)) if positions is None else positions).expand(tokens.shape)
        x = self.embedding.word_embeddings(tokens)
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.embedding.position_embeddings(positions)
        x = apply_mask(mask, "embedding", x)
        for layer in self.layers:
            x = layer(x, mask, positions, documents)
        self.hidden_states, self.places = x, (mask, positions, documents)
        return self.logits(x)

    def logits(self, x):
        head = self.embedding.word_embeddings if self.output_layer is None else self.output_layer
        return F.linear(self.final_norm(x), head.weight[: self.config.vocab_size])

    def depth_losses(self, labels, weights):
        """Return for each depth the sum of its losses that count, after forward(). weights[d - 1] [b, s]: 1 where the
        loss of depth d counts. The labels are t1 .. ts. Where there is no later token, 0 stands in for it.
        """
        x, sums = self.hidden_states, []
        for d, (depth, weight) in enumerate(zip(self.mtp, weights), 1):
            following = F.pad(labels, (0, d))[:, d - 1 :]  # t(d) .. t(s + 1)
            words = self.embedding.word_embeddings(following[:, :-1])
            x = depth(words, x, *self.places)
            losses = F.cross_entropy(self.logits(x).transpose(1, 2), following[:, 1:], reduction="none")
            sums.append((losses * weight).sum())
        return sums

    def parts(self):
        """Return {nanodomino's name: this model's tensors}: three for the fused q, k, v, two for gate and up."""
        named = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            for part, whole in FUSED.items():
                name = name.replace(part, whole)
            named.setdefault(name, []).append(tensor)
        return named

    @torch.no_grad()
    def load_full(self, weights):
        """Copy full tensors in. Raises AssertionError if a name is missing or unknown, or if a shape differs."""
        named = self.parts()
        assert named.keys() == weights.keys(), f"names that only one side has: {sorted(named.keys() ^ weights.keys())}"
        for name, parameters in named.items():
            full = weights[name]
            if len(parameters) == 3:
                tensors = split_qkv(full, self.config.num_query_groups, self.config.kv_channels)
            else:
                tensors = full.chunk(len(parameters), dim=dim_of_parts(name, full))
            for parameter, tensor in zip(parameters, tensors):
                assert parameter.shape == tensor.shape, name     # copy_ would broadcast
                parameter.copy_(tensor)
        return self

    def full(self, value_of):
        """Return {name: full tensor}, copies of value_of(parameter): the parameter itself or its gradient."""
        tensors = {}
        for name, parameters in self.parts().items():
            values = [value_of(parameter).detach().clone() for parameter in parameters]
            tensors[name] = fuse_qkv(*values, self.config.num_query_groups) if len(values) == 3 else (
                torch.cat(values, dim=dim_of_parts(name, values[0])))
        return tensors

    def full_weights(self):
        return self.full(lambda parameter: parameter)

    def full_gradients(self):
        """Return {name: gradient}, zeros for parameters without one."""
        return self.full(lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


# ---- weights

def full_shapes(config):
    """Return {name: shape} of every full tensor, in forward order."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in ReferenceGPT(config).full_weights().items()}


def random_weights(config, seed=0):
    """Return full tensors that hide no term: biases are not 0, norm weights are not 1, padded rows are not 0.

    Matrices are scaled by 1/sqrt(columns), so that scores and logits are of order one and softmax is neither flat nor
    one-hot.
    """
    generator, weights, shapes = torch.Generator().manual_seed(seed), {}, full_shapes(config)
    layers = [re.match(r"layers\.\d+|mtp\.\d+\.layer|.*", name)[0] for name in shapes]
    in_order = sorted(zip(layers, shapes), key=lambda pair: (layers.index(pair[0]), pair[1].endswith(".bias")))
    for _, name in in_order:                     # a layer's biases after its weights
        noise = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
        is_matrix, has_mean = noise.dim() > 1, name.endswith("norm.weight")
        weights[name] = noise / math.sqrt(noise.size(-1)) if is_matrix else 0.2 * noise + has_mean
    return weights


# ---- training

def masked_loss(logits, labels, loss_mask):
    """Return the mean loss of the unmasked tokens: sum(mask * loss) / sum(mask). labels, loss_mask: [b, s]."""
    token_losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (token_losses * loss_mask).sum() / loss_mask.sum()


def train_reference(config, weights, batches, learning_rates, masks=None):
    """Train from `weights` for len(batches) steps. Returns (a StepRecord for each step, final weights by name).

    batches[step]: (tokens, labels, loss_mask), each [B, s]: the whole global batch; then perhaps positions and
    documents, or None: position i of a row has number i, a row is one document; then for each depth the loss mask.
    learning_rates[step]: that step's rate. masks[step], if given: the `mask` of ReferenceGPT.forward for that step.
    """
    model, records = ReferenceGPT(config).double().load_full(weights), []
    matrices, vectors = ([weight for weight in model.parameters() if (weight.dim() > 1) == decays]
                         for decays in (True, False))                          # biases and norms do not decay
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": config.weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    for step, (tokens, labels, loss_mask, *places) in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        positions, documents, *depth_masks = places or (None, None)
        logits = model(tokens, positions, documents, masks and masks[step])
        loss = masked_loss(logits, labels, loss_mask)
        sums = model.depth_losses(labels, depth_masks)
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        further = sum(layer.routing_loss for layer in layers)
        if sums:
            further = further + config.mtp_loss_scaling_factor * torch.stack(sums).mean()
        (loss + further / loss_mask.sum()).backward()
        biases = [layer for layer in layers if layer.router.expert_bias is not None]
        for layer in biases:  # a buffer, which the norm and the optimizer leave out
            layer.router.expert_bias.grad = layer.excess / loss_mask.sum()
        gradients = model.full_gradients()
        # parameters() lists the tied matrix once, so the norm counts it once; the scale is min(1, clip / (norm + 1e-6))
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad or math.inf)
        rows = [(total.item(), mask.sum().item()) for total, mask in zip(sums, depth_masks)]
        rows += [layer.statistics for layer in layers]
        records.append(StepRecord(loss.item(), gradients, norm.item(), [number for row in rows for number in row]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rates[step]
        optimizer.step()
        for layer in biases:
            layer.router.expert_bias -= config.moe_router_bias_update_rate * torch.sign(layer.excess)
    return records, model.full_weights()
