"""Print docs/settings.md: python -m nanodomino.config > docs/settings.md."""

from nanodomino.config.config import Config
from nanodomino.config.flags import markdown
from nanodomino.config.setting import EFFECTS

if __name__ == "__main__":
    print("# Every setting\n\n`python -m nanodomino.config > docs/settings.md` made this page from the lines in "
          "`nanodomino/config/config.py`. `--config FILE` takes\nany of them from a JSON file, named as in a run's "
          "`config.json`. When a run goes on, another value of a setting means:\n\n"
          + "\n".join(f"- *{role}*: {meaning}" for role, meaning in EFFECTS.items()))
    print(markdown(Config))
