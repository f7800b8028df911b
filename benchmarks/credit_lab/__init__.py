"""The credit lab: toy environments ("worlds") with known answers, on which tiny policies learn through our code.

worlds.py      the worlds, as tables
exact.py       return, gradient and values of a policy, by dynamic programming: the known answers
play.py        a tabular policy plays a world: real `Group`s of real `Trajectory`s
variants.py    the algorithms to compare, with their critics
estimate.py    groups -> `assign_credit` -> the algorithm's loss -> a gradient; its bias and noise
train.py       learning curves, and how the learning rate is chosen
measure.py     everything, in several processes -> results/credit_lab.json
report.py      that file as the tables of docs/credit-lab.md
picture.py     that file as docs/credit_lab.png
"""
