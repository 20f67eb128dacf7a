"""``python -m grain_shard``: the commands are in `grain_shard.tools.command`."""

from grain_shard.tools.command import command

if __name__ == "__main__":
    command()
