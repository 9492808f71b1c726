"""What the tests of checkpoints share: layouts, training from and to a checkpoint, checkpoints without tensors."""

from pathlib import Path

from support.harness import build, tiny, train_steps

from nanodomino.checkpoint import load as checkpoints
from nanodomino.checkpoint.format import FORMAT, manifest_text
from nanodomino.checkpoint.save import Saver


# tp, pp, dp, slices, zero stage, schedule
LAYOUTS = [(1, 1, 1, 1, 1, "1f1b"), (2, 1, 1, 2, 1, "1f1b"), (1, 2, 1, 1, 0, "zb-v"), (1, 1, 2, 1, 2, "1f1b"),
           (1, 1, 2, 1, 0, "1f1b"), (4, 1, 1, 3, 1, "1f1b"), (2, 2, 1, 2, 1, "interleaved"), (2, 1, 2, 1, 1, "1f1b"),
           (1, 4, 1, 1, 1, "1f1b"), (1, 2, 2, 1, 1, "gpipe"), (1, 1, 4, 1, 2, "1f1b"), (2, 2, 2, 2, 1, "1f1b")]
ONE_RANK, TP2, DP2, TP2_DP2, TP2_PP2_DP2 = (LAYOUTS[i] for i in (0, 1, 3, 7, 11))

# a SwiGLU's two runs of rows, in a matrix and its bias; groups of heads; norms of q and k
LLAMA = dict(swiglu=True, position_embedding_type="rope", num_query_groups=4, kv_channels=4, qk_layernorm=True)
EXPERTS = dict(num_experts=4, moe_layer_freq=2, moe_ffn_hidden_size=20, moe_shared_expert_intermediate_size=10,
               moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05, moe_aux_loss_coeff=0.1,
               disable_bias_linear=True, swiglu=True)
UNEVEN = dict(hidden_size=24, ffn_hidden_size=52, bucket_size=700)        # ranks own ranges that end within rows


def config_for(tp, pp, dp, slices, zero_stage, schedule, **settings):
    cp = settings.get("context_parallel_size", 1)
    return tiny(tp * pp * dp * cp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, slices=slices,
                zero_stage=zero_stage, schedule=schedule, num_layers=4, global_batch_size=12,
                micro_batch_size=min(6, 12 // dp), eval_iters=0, **settings)


def train_from(config, weights, data, first, last, load=None, save_to=None):
    """On this rank, run steps first + 1 .. last, starting from full weights or a checkpoint; save at the end."""
    mesh, model, optimizer, _ = built = build(config, weights)
    if load:
        assert checkpoints.restore(Path(load), model, optimizer, mesh) == first
    outcome = train_steps(built, config, data, range(first + 1, last + 1))
    if save_to:
        saver = Saver(Path(save_to), mesh, keep_last=3)
        saver.save(last, model, optimizer, config)
        saver.wait()
        assert saver.failure() is None
    return outcome


def make_saver(config, folder, keep_last=1):
    """(saver, model, save); save(step, skipped_in_a_row) saves on this rank, waits, and returns the failure or None."""
    mesh, model, optimizer, _ = build(config)
    saver = Saver(Path(folder), mesh, keep_last)

    def save(step=1, skipped_in_a_row=0):
        optimizer.skipped_in_a_row = skipped_in_a_row
        saver.save(step, model, optimizer, config)
        saver.wait()
        return saver.failure()

    return saver, model, save


def save_steps(config, folder, steps=((1, 0),), keep_last=1):
    """On this rank, save each of these (step, skipped_in_a_row); return the failures."""
    _, _, save = make_saver(config, folder, keep_last)
    return [save(*step) for step in steps]


def write_empty_checkpoint(folder, step):
    """Write an intact checkpoint of this step without any tensor."""
    folder.mkdir(parents=True)
    content = dict(format=FORMAT, step=step, adam_steps=step, skipped_in_a_row=0, config={}, files={})
    (folder / "manifest.json").write_text(manifest_text(content))
    return folder
