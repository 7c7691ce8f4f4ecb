"""What orchestration costs: real workflows, activities, workers, Temporal server and object store around parts that do nothing.

    python -m scripts.scale --groups 8 --rollouts 64 --steps 50 [--train off] [--response-tokens 64] [--out DIR]

Three parts are replaced, each behind the interface that the product has for it:
    engine    `engine.py`, a server of SGLang's protocol that answers at once; the engine worker starts it where SGLang would be
    judge     `task/noop`, a judge of the kind that runs programs itself (`ServiceJudge`), so that no sandbox is entered
    trainer   `trainer.py`, a back-end of the train room without a model; documents, advantages, checkpoints and the gate are real
Log-probs of engine and trainer come from one formula (`arithmetic.py`) that moves with the adapter's weights, so the publish gate
is passed because its numbers are right, and not because it was turned off.

Definitions, for one step of G groups x R rollouts:
    wall      seconds from the start of the step's workflow to its end, as Temporal records them
    between   seconds from the end of the step before to its start: the loop of DiscoveryRun
    work      CPU seconds of the engine process + seconds inside the trainer's back-end + seconds inside the judge (its time for
              one program, measured apart, times G x R)
    orchestration milliseconds per rollout = 1000 (wall + between - work) / (G R)
`work` may overlap with orchestration on another core; then the true number lies between this one and the same without `work`,
which is why `work` is told beside it. All rollouts begin at once, so it is a rate and no latency: what a rollout adds to the step.
CPU per rollout counts all threads of a process and does not depend on what else the machine does as much as wall time does.
"""
