"""Train a recipe on verl: its Ray workers, sharded training and rollout servers; our flows, rewards, credit and losses.

Our own training loop (`train/loop.py`) drives verl's worker groups, so a step means the same as in a local run. verl's
own trainer, its agent loops and its replay buffer are not used.

    launch.py       what the command line calls
    settings.py     our settings as verl's, and what verl cannot do                   (no verl, no Ray)
    contract.py     everything of verl that is used here, with its signatures
    cluster.py      starts a Ray cluster, or joins a running one
    assemble.py     starts all processes and builds the trainer
    trainer.py      `Trainer` whose episodes, updates and checkpoints are verl's
    learner.py      `Learner` over verl's worker groups                               (no verl, no Ray)
    rows.py         trajectories in compact form, and as verl's rows                  (no verl, no Ray)
    workers.py      verl's training workers and rollout servers
    watch.py        notices processes that died
    reader.py       tokenizer and chat template without the model
    adapters.py     merges trained adapters into their base                           (no verl, no Ray)

    inside/         what runs in verl's and Ray's processes
      plugin.py     what every process of verl loads
      losses.py     an algorithm's loss on a training worker                          (no verl, no Ray)
      schedule.py   AdamW as our learner has it                                       (no verl, no Ray)
      agent_loop.py plays episodes; and the collector that hands rows to it
      sampler.py    a `Sampler` over verl's rollout servers                           (no verl, no Ray)
      server.py     the local engine as a rollout server, for runs without GPUs
      reaper.py     ends what is left of a Ray cluster after its driver              (no verl, no Ray)
      cpu.py        what verl lacks on a machine without GPUs
"""
