"""The command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1

``--help`` lists every choice. An installed package has the same as the command ``contrafed``.
"""

from contrafed.command import command

if __name__ == "__main__":
    command()
