"""Configurations that no run takes. Each is one line with the key at fault, before any work and any folder."""

import pytest
from helpers import check_overrides, config_of

from contrafed.runs.run import run
from contrafed.runs.setup import compose_deployed_run

SAMPLED_RUN = "strategy=fedavg strategy.weights=all_clients participation=bernoulli participation.beta=null privacy=central" \
              " privacy.amplification=true"  # fmt: skip
DEAD_RATE = "num_rounds=300 strategy.local.lr_decay=0.05"
LATE = "clock=lognormal participation.deadline=5"
BUFFER = "strategy=fedavg clock=lognormal schedule=buffered schedule.buffer_size=2 schedule.concurrency=4"
LONE_EXAMPLES = "model=cnn_bn partition=iid num_clients=15"
ONE_PASS = "strategy.local.iterations=null strategy.local.epochs=1 strategy.local.batch_size=8"

# What is found without data, by its key.
MISTAKES = {
    "strategy": ["strategy=pfml", "strategy=PMFL", "~strategy", "strategy=fedavg,moon", "strategy=[moon]"],
    "strategy.temprature": ["strategy.temprature=1"],
    "strategy.temperature": ["strategy.temperature=0", "strategy.temperature=nan"],
    "strategy.threshold": ["strategy.threshold=sharp"],
    "strategy.extra": ["+strategy.extra=1"],
    "strategy.beta1": ["strategy=fedrcl strategy.beta1=0.5"],
    "strategy.outer_lr": ["strategy=pfedme strategy.outer_lr=0.1 strategy.pull_weight=10"],
    "strategy.server": [
        "strategy=fedavg strategy.server=fedam", "strategy=fedcrl strategy.server=fedavgm",
        "strategy=fedavg strategy.server=[fedavg]",
        *(f"strategy={name} strategy.local.{change}" for name in ("fednova", "moon strategy.server=fednova")
          for change in ("optimizer=adam", "momentum=0.9 strategy.local.keep_optimizer=true")),
    ],
    "strategy.weights": [
        "participation=arrival strategy=fedavg strategy.weights=known_probability",
        *(f"strategy=fedavg strategy.server={name} strategy.weights=known_probability"
          for name in ("fedavgm", "fedau", "fedadam", "fedexp", "fednova", "fedawe", "pmfl")),
        *(f"strategy=fedavg {time} strategy.weights=known_probability" for time in (LATE, BUFFER)),
    ],
    "strategy.local": ["strategy.local=3"],
    "strategy.local.learning_rate": ["strategy.local.learning_rate=1"],
    "strategy.local.augment[0]": ["strategy=fedrcl strategy.local.augment=[blur]"],
    "strategy.local.augment": ["strategy=fedrcl strategy.local.augment=[crop,crop]"],
    "model.channels": ["model=cnn_bn model.channels=[]", "model=cnn1d model.channels=[]"],
    "strategy.local.batch_size": ["strategy.local.batch_size=1.5", "strategy.local.batch_size=0"],
    "strategy.local.optimizer": ["strategy.local.optimizer=lion"],
    "strategy.local.momentum": [
        "strategy.local.optimizer=adam strategy.local.momentum=0.9",
        "experiment=mpfedcon/base strategy.local.optimizer=adam"],
    "local.lr": ["local.lr=0.1"],
    "shard": ["shard=1/2"],
    "partition.feature_shift.strength": ["partition.feature_shift.kind=brightness partition.feature_shift.strength=3"],
    "strategy.local.epochs": ["strategy.local.epochs=1"],
    "dataset": ["dataset=cifar11", "dataset=CIFAR10", "dataset={a:1}", "dataset=npz", "dataset=hub",
                "dataset=hub dataset.repository=a/b dataset.download=false dataset.root=/no/such"],
    "dataset.path": ["dataset=npz dataset.path=/no/such.npz"],
    "dataset.validation_fraction": ["partition=file partition.path=main.py dataset.validation_fraction=0.2"],
    "partition": ["partition=null", "partition=sampled partition.cut_test=true",
                  "partition=sampled partition.validation_fraction=0.2",
                  "partition=own dataset=own dataset.num_classes=3 partition.feature_shift.kind=rotation"],
    "participation": ["participation=markov", "participation=fulll"],
    "participation.path": ["participation=trace", "participation=trace participation.path=/nowhere.csv"],
    "participation.repeat": ["participation=trace participation.repeat=3"],
    "participation.select": [
        *(f"num_clients=10 participation=uniform participation.select={value}" for value in (11, 0, 1.5)),
        "participation=full participation.select=many", "participation=full participation.select=true"],
    "participation.deadline": [
        "participation.deadline=5", f"{BUFFER} participation.deadline=3",
        *(f"clock=lognormal participation.deadline={value}" for value in ("q1.5", 0))],
    "participation.over_select": [
        "clock=lognormal participation.over_select=1.3",
        "participation=uniform participation.select=2 participation.over_select=1.3"],
    "participation.staleness_a": [f"{LATE} participation.staleness_a=0.5"],
    "participation.late": [
        "clock=lognormal participation.late=stale",
        *(f"{LATE} participation.late=stale strategy={name}" for name in ("scaffold", "fedcrl")),
        *(f"{LATE} participation.late=partial strategy={name}" for name in (
            "ditto", "fedala", "fedas", "fedpac", "fedrep", "mpfedcon", "scaffold", "pfedme",
            "fedavg strategy.server=fednova"))],
    "participation.selct": ["participation=full participation.selct=3"],
    "participation.loss_rate": [f"participation=full participation.loss_rate={value}" for value in (-0.1, 1.5, "often")],
    "participation.beta": ["participation=bernoulli participation.beta=0"],
    "participation.floor": ["participation=bernoulli participation.floor=1.5"],
    "participation.scaling": ["participation=bernoulli participation.scaling=x"],
    "participation.mean_probability": [
        "participation=bernoulli participation.mean_probability=1.1",
        "participation=bernoulli participation.scaling=empirical_floor participation.floor=0.2"],
    "participation.p01": ["participation=markovian participation.p01=0"],
    "participation.p10": ["participation=markovian participation.p10=1"],
    "participation.chain": ["participation=markovian participation.chain=x"],
    "participation.period": [
        "participation=cyclic participation.period=0",
        "participation=cyclic participation.period=1 participation.variant=fedau"],
    "participation.variant": ["participation=cyclic participation.variant=x"],
    "participation.joins": ["participation=arrival participation.joins=3"],
    "participation.joins[0]": [f"participation=arrival participation.joins=[{value}]" for value in (
        "[3]", "[0,0.5]", "[true,0.5]", "[100000000000000000000,0.5]", "[2,[a]]", "[2,[50]]")],
    "participation.joins[1]": [f"participation=arrival participation.joins=[{value}]" for value in (
        "[2,[3]],[4,[3]]", "[2,0.6],[3,0.6]")],
    "participation.leaves[0]": [f"participation=arrival participation.leaves=[{value}" for value in (
        "[2,[]]]", "[2,3]]", "[5,[3]]] participation.joins=[[5,[3]]]", "[5,0.6]] participation.joins=[[9,0.5]]")],
    "participation.leaves[1]": ["participation=arrival participation.leaves=[[2,0.5],[3,1.5]]"],
    "model.hidden[0]": ["model.hidden=[a]"],
    "clock": [f"{BUFFER} clock=none"],
    "schedule": [f"{BUFFER} {change}" for change in ("strategy=scaffold", "strategy=fedppo")],
    "schedule.buffer_size": [
        f"{BUFFER} schedule.buffer_size=51", f"{BUFFER} participation=uniform participation.select=0.02"],
    "schedule.concurrency": [f"{BUFFER} schedule.concurrency=0"],
    "engine": ["engine=rai", f"{BUFFER} engine=flower"],
    "engine.device": ["engine=local engine.device=gpu"],
    "engine.gpus_per_worker": ["engine.gpus_per_worker=1.5", "engine.gpus_per_worker=2"],
    "engine.gpus_per_client": ["engine=flower engine.gpus_per_client=2"],
    "engine.round_timeout": ["engine=flower engine.round_timeout=5"],
    "attack": [
        "strategy=local attack=alie", f"{BUFFER} attack=alie",
        *(f"strategy=fedavg attack={name} attack.fraction=1 num_clients=4" for name in ("ipm", "alie")),
        "strategy=fedavg attack=ipm num_clients=10 held_out_clients=2 attack.clients=[0,1,2,3,4,5,6,7]"],
    "attack.clients": [
        "attack=ipm attack.clients=[50]", "attack=label_flip attack.clients=[-1]", "attack=alie attack.clients=[]",
        "strategy=fedavg attack=label_flip num_clients=10 held_out_clients=2 attack.clients=[0,8]"],
    "attack.fraction": ["attack=alie attack.fraction=1.5", "strategy=fedavg attack=ipm attack.fraction=0.04 num_clients=10"],
    "attack.z": ["attack=alie attack.z=-1"],
    "attack.factor": ["attack=scale attack.factor=0"],
    "aggregation.assumed": ["aggregation=krum aggregation.assumed=0.5"],
    "aggregation.keep": ["aggregation=multi_krum aggregation.keep=0"],
    "aggregation.trim": ["aggregation=trimmed_mean aggregation.trim=0.5", "aggregation=median aggregation.trim=0.1"],
    "aggregation.iterations": ["aggregation=geometric_median aggregation.iterations=0"],
    "aggregation.bound": ["aggregation=norm_clip aggregation.bound=0"],
    # Others than means of the participants.
    "aggregation": [f"aggregation=median strategy={name}" for name in (
        "pmfl", "scaffold", "fedavg strategy.server=fedau", "fedavg strategy.server=mifa",
        "fedavg strategy.weights=all_clients", "fedavg strategy.weights=known_probability participation=full")],
    "privacy": [
        "strategy=fedavg privacy=central aggregation=median", f"{BUFFER} privacy=central privacy.clip_norm=1",
        "strategy=mpfedcon strategy.centre_memory=bank privacy=central",
        # What has no clip, and what epsilon would not hold for.
        *(f"strategy={name} privacy=laplace" for name in ("fedpac", "scaffold", "fedppo", "local")),
        *(f"strategy={name} privacy=central" for name in (
            "fedexp", "fedvarp", "mifa", "fedamp", "fedgh", "feddyn", "fedpac", "scaffold", "fedppo", "local")),
    ],
    "privacy.seeded_noise": ["strategy=fedavg privacy=central resume=latest"],
    "privacy.amplification": [
        f"{SAMPLED_RUN} participation=markovian".replace("participation=bernoulli participation.beta=null ", ""),
        *(f"{SAMPLED_RUN} {change}" for change in (
            "participation.beta=0.1", "participation.select=3", "participation.loss_rate=1", "strategy.weights=uniform",
            "clock=lognormal participation.deadline=q0.5")),
    ],
    # What would reveal a rejected reply.
    "engine.max_norm": ["strategy=fedavg privacy=central engine.max_norm=5"],
    "engine.max_norm_ratio": ["strategy=fedavg privacy=central engine.max_norm_ratio=50"],
    "min_replies": ["strategy=fedavg privacy=central min_replies=2", f"{BUFFER} min_replies=3"],
    "on_divergence": ["strategy=fedavg privacy=central on_divergence=stop"],
    "sed": ["sed=1"],
    "extra": ["+extra=1"],
    "seed": ["seed=-1"],
    "seed.x": ["seed.x=1"],
    "federation_seed": ["federation_seed=-1", "federation_seed=0.5", "federation_seed=many"],
    "num_rounds": ["num_rounds=-1", "num_rounds=many", "num_rounds=2.5"],
    "num_clients": ["num_clients=0"],
    "verbose": ["verbose=3"],
    "metrics": ["metrics=macro_f1", "metrics=[mcc,mcc]"],
    "metrics entry": ["metrics=[makro_f1]"],
    "settings": ["settings=code", "experiment=digits settings=printed"],
    "log": ["log=[probability] participation=full"],
    "init_from": ["init_from=/no/such", "init_from="],
    "resume": ["resume="],
    "evaluate_only": ["evaluate_only="],
    "output_dir": ["output_dir=", "output_dir=" + 300 * "a"],
    None: ["foo"],
}  # fmt: skip
# What is found with the data: nothing is scored, a log does not go with the strategy, a rate comes to 0, batches of one.
MISTAKES_WITH_DATA = {
    "early_stop": [
        "strategy=fedper early_stop=3", "strategy=fedper eval_clients=false early_stop=1",
        "strategy=fedper early_stop=1 select_on=test partition.test_fraction=0 partition.validation_fraction=0.2"],
    "evaluate_after": ["strategy=fedavg evaluate_after=local_training"],
    "save_personal": ["strategy=fedavg save_personal=true"],
    "select_on": [
        "strategy=fedavg select_on=validation",
        "strategy=fedper select_on=validation dataset.validation_fraction=0.2 partition.test_fraction=0.2",
        "strategy=fedper select_on=validation dataset.validation_fraction=0.2 partition.test_fraction=0"],
    "model.buffers": ["strategy=fedavg model=cnn_bn privacy=local", *(
        f"strategy=fedavg model=cnn_bn aggregation={name}"
        for name in ("krum", "multi_krum", "norm_clip", "geometric_median"))],
    "target_accuracy": ["strategy=fedper target_accuracy=0.5", "strategy=fedper eval_clients=false target_accuracy=0.5"],
    "eval_clients": ["strategy=fedper eval_clients=true", "strategy=fedper eval_clients=true partition=sampled"],
    "held_out_clients": [
        "held_out_clients=4", "held_out_clients=1",
        "strategy=fedper partition=iid partition.validation_fraction=0.2 held_out_clients=2"],
    "partition.scarce_clients": ["held_out_clients=1 partition.scarce_clients=1 partition.test_fraction=0.2"],
    "log": [
        "strategy=fedavg log=[weigths]", "strategy=fedavg log=[weights]", "strategy=fedproto log=[deviation]",
        "strategy=lgfedavg log=[features]", "strategy=fedper log=[clients_train]", "strategy=fedamp log=[clients_train]",
        "strategy=fedavg dataset.merge_splits=true partition.test_fraction=0 log=[features]",
    ],
    "strategy.local.lr_decay": [f"strategy={name} {DEAD_RATE}" for name in (
        "fedavg", "fedavg strategy/server=fednova", "mifa")],
    "strategy.local.batch_size": [f"strategy=fedavg {LONE_EXAMPLES} strategy.local.batch_size=1"],
    "strategy.local.last_batch": [f"strategy=fedavg {LONE_EXAMPLES} {ONE_PASS}"],
    "strategy.align_batch": [f"strategy=fedas {LONE_EXAMPLES} strategy.align_batch=1"],
    "strategy.tune_batch_size": [f"strategy=fedavg_ft strategy.tune=all {LONE_EXAMPLES} strategy.tune_batch_size=1"],
    "model.freeze": ["strategy=fedgh model.freeze=[classifier.bias]"],
    "strategy.local.proximal_weight": [
        f"strategy={name} strategy.local.proximal_weight=0.1" for name in ("local", "fedproto", "fedtgp", "fedamp", "pfedme")],
}  # fmt: skip
MISTAKES_ON_DEVICES = {
    "strategy": ["strategy=fedcrll"],
    "overrides": ["output_dir='a b"],
    "min_replies": ["min_replies=4", "min_replies=3 participation=uniform participation.select=2",
                    "min_replies=3 participation=full held_out_clients=1"],
    "dataset": ["partition=own dataset=own", "dataset=own"],
    "partition": ["partition=own partition.keep_fraction=0.5"],
    "privacy.seeded_noise": ["privacy=local privacy.seeded_noise=true"],
    "privacy.amplification": [SAMPLED_RUN],
    "clock": ["clock=lognormal strategy=fedavg"],
    "attack": [f"attack={name}" for name in ("label_flip", "sign_flip", "scale", "noise", "alie", "ipm")],
}  # fmt: skip


def by_key(mistakes):
    cases = [pytest.param(key, asked, id=f"{key}-{asked}") for key, many in mistakes.items() for asked in many]
    return pytest.mark.parametrize(("key", "asked"), cases)


@by_key(MISTAKES)
def test_a_mistake_is_one_line(expect_error, key, asked):
    with expect_error(key):
        check_overrides(*asked.split())


@pytest.mark.parametrize(
    "asked",
    [
        "strategy=fednova strategy.local.momentum=0.9",
        "experiment=mpfedcon/base strategy.local.optimizer=adam strategy.local.momentum=0",
        "strategy=moon strategy.local.optimizer=adam resume=latest",
        "partition.feature_shift.kind=brightness partition.feature_shift.strength=1",
        "partition.feature_shift.kind=noise partition.feature_shift.strength=3",
        SAMPLED_RUN,
        *(f"strategy=fedavg privacy=local {change}" for change in ("engine.max_norm=5", "engine.max_norm_ratio=50")),
        *(f"strategy=fedavg privacy=local {change}" for change in ("min_replies=2", "on_divergence=stop")),
        *(
            f"strategy=fedavg attack={attack} attack.fraction=1 num_clients=4"
            for attack in ("alie attack.known=attackers", "sign_flip")
        ),
    ],
)
def test_what_is_near_a_mistake_is_taken(asked):
    check_overrides(*asked.split())


@by_key(MISTAKES_WITH_DATA)
def test_a_mistake_beside_the_data_is_one_line_and_leaves_no_folder(tmp_path, expect_error, key, asked):
    quick = ("engine=local", "num_clients=4", "num_rounds=1", "model=mlp")
    with expect_error(key):
        run(config_of(*quick, *asked.split(), f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()


@by_key(MISTAKES_ON_DEVICES)
def test_a_mistake_on_devices_is_one_line_and_leaves_no_folder(tmp_path, expect_error, key, asked):
    with expect_error(key):
        compose_deployed_run(f"num_clients=3 engine=local output_dir={tmp_path}/run {asked}")
    assert not (tmp_path / "run").exists()
