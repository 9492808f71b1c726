"""Reads records: the settings that a run stores in config.json and in each checkpoint's manifest, or that a user writes
into a --config file. A setting that a record lacks has its default.
"""

import dataclasses

from nanodomino.errors import require
from nanodomino.optim.optimizers import learning_rate
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_settings, names_affecting
from nanodomino.settings.rules import holds

# settings of the effect "run" on which the loss of the same weights does not depend
WITHOUT_WEIGHTS = {"data_sha256", "seed", "init_method_std"}


def check_record(record: dict, source) -> dict:
    """Return the settings of a record. Raises UserError if a name is not known, as of a later version's setting, or if
    a value has the wrong type. source: the name of the record's file, for messages."""
    known = {setting.name: setting for setting in dataclasses.fields(Config)}
    gone = ("cpu_threads", "without_effect", *record.get("without_effect", ()))        # only older versions wrote these
    record = {name: value for name, value in record.items() if name in known or name not in gone}
    unknown = sorted(record.keys() - known.keys())
    fix = ("use the version that wrote them" if "given" in record else       # the program writes `given`, users do not
           "correct the names, or convert a Hugging Face model with `python -m nanodomino.huggingface import`")
    require(not unknown, f"{source} has settings that this version does not know ({', '.join(unknown[:9])}); {fix}")
    for name, value in record.items():
        type = list if name == "given" else known[name].type
        types = {float: (int, float), list: (list, tuple)}.get(type, type)
        require(value is None or isinstance(value, types) and isinstance(value, bool) == (type is bool)
                and (type is not list or all(isinstance(each, str) for each in value)),
                f"{source} gives {value!r} as {name}, but must give a value of type {type.__name__}"
                f"{' of names' * (type is list)}; correct it")
    return record


def from_record(record: dict, source) -> Config:
    """Return the Config that a stored record describes. Raises UserError."""
    return Config(**check_record(record, source) | {"given": tuple(record.get("given") or ())})


def remembered_settings(record: dict) -> dict:
    """Return the settings of a record that later launches reuse: all except launch-only and computed settings."""
    return {setting.name: record[setting.name] for setting in flag_settings(Config)
            if record.get(setting.name) is not None and setting.metadata["affects"] != "launch"
            and (not setting.metadata["derived"] or setting.name in (record.get("given") or ()))}


def taken_over(record: dict, finetune: bool) -> dict:
    """Return the settings of a record that --load takes over: those on which the loss of the same weights depends.
    Without --finetune it also takes over what a resumed run remembers, except the layout and the machine."""
    names = {*names_affecting(Config, "model", "positions", "run")} - WITHOUT_WEIGHTS
    if not finetune:
        own = {setting.name for setting in flag_settings(Config, "The layout", "The machine")} | {"load", "finetune"}
        names |= remembered_settings(record).keys() - own
    return {name: value for name, value in record.items() if name in names and value is not None}


def news(saved: Config, config: Config, step: int, taken=()) -> list[str]:
    """Return what differs from a checkpoint's settings `saved`, such as "lr 0.004 (was 0.001)", and what is taken over.
    step: the checkpoint's, or 0 if only its weights are loaded; then it does not matter how they were trained.
    taken: the names of the settings that --load takes over; defaults and the sizes of the model are left out"""
    kinds = ("model", "positions", "optimizer", "run", *(("losses", "nothing") if step else ()))
    left_out = {"load", "finetune"} | (set() if step else WITHOUT_WEIGHTS)
    same, changed = [], []
    for setting in flag_settings(Config):
        name, affects = setting.name, setting.metadata["affects"]
        old, new = getattr(saved, name), getattr(config, name)
        if name == "lr_decay_iters" and new:
            old = old or saved.train_iters                     # its default
        if old != new and affects in kinds and name not in left_out:
            changed.append(f"{name} {new} (was {old})")
        elif (old == new and name in taken and affects not in ("model", "positions")
              and new not in (setting.default, config.preset.get(name))
              and all(holds(need, config) for need in setting.metadata["needs"])):
            same.append(f"{name} {new}")
    said = [f"taken over: {', '.join(same)}"] * bool(same) + changed
    if config.sample_offset != saved.sample_offset and step:
        said.append(f"the data go on at sample {config.consumed_train_samples(step)}")
    if 0 < step < config.train_iters and (rate := learning_rate(step, saved)) != learning_rate(step, config):
        stretched = saved.train_iters != config.train_iters and not config.lr_decay_iters and (
            saved.lr_decay_style == config.lr_decay_style)
        said.append(f"the learning rate goes from {rate:.2e} to {learning_rate(step + 1, config):.2e}"
                    + f" (--lr-decay-iters {saved.train_iters} keeps its decay)" * stretched)
    return said


def check_settings(record: dict, source, config: Config, *effects):
    """Raise UserError if `config` and the record differ in a setting with one of these effects (keys of EFFECTS)."""
    saved = from_record(record, source)
    # derived settings come last, so that the message names the setting that the user changed, not one derived from it
    for setting in sorted(dataclasses.fields(Config), key=lambda setting: setting.metadata.get("derived", False)):
        name = setting.name
        if setting.metadata["affects"] not in effects or name not in record:
            continue
        recorded, requested, is_text = getattr(saved, name), getattr(config, name), name == "data_sha256"
        old, new = (f" (--data-path {each.data_path})" * is_text for each in (saved, config))
        require(recorded == requested, f"{source} was made with {'the text of ' * is_text}{name.replace('_', '-')} "
                f"{recorded}{old}, but this run has {requested}{new}; go back to the old "
                f"{'text' if is_text else 'value'}, or start another run "
                + ("without --load" if config.finetune else "(if the model is the same, from these weights: --load "
                   "FOLDER --finetune)"))
