"""What names outside the project do: draws, effects, logs, collectives."""

from __future__ import annotations

from elasticrun.lint.naming import named

COLLECTIVES = named("""
    all_reduce all_gather all_gather_object all_gather_into_tensor barrier broadcast
    broadcast_object_list reduce reduce_scatter reduce_scatter_tensor gather
    gather_object scatter scatter_object_list all_to_all all_to_all_single
    monitored_barrier new_group
""")

ELASTIC_COLLECTIVES = named("init save_all_states init_process_group")

TRACKER_KEYS = {
    "wandb.init": ("id", "resume"),
    "mlflow.start_run": ("run_id",),
    "neptune.init_run": ("with_id", "custom_run_id"),
    "neptune.init": ("run", "with_id"),
    "comet_ml.Experiment": ("experiment_key",),
    "comet_ml.start": ("experiment_key",),
    "clearml.Task.init": ("continue_last_task", "reuse_last_task_id"),
    "aim.Run": ("run_hash",),
    "swanlab.init": ("id", "resume"),
    "trackio.init": ("resume",),
}

WRAPPERS = named("""
    enumerate tqdm trange zip islice iter list tuple sorted reversed cycle chain map
    filter track count
""")

_NUMPY_DRAWS = (
    "rand randn randint random choice permutation shuffle normal uniform beta binomial "
    "poisson random_sample standard_normal integers"
)

_TORCH_DRAWS = (
    "rand randn randint randperm bernoulli multinomial normal rand_like randn_like "
    "randint_like"
)

_PYTHON_DRAWS = (
    "random randint uniform choice choices sample shuffle gauss randrange getrandbits "
    "betavariate normalvariate betavariate triangular expovariate"
)

DRAWS = frozenset(
    [f"numpy.random.{name}" for name in _NUMPY_DRAWS.split()]
    + [f"torch.{name}" for name in _TORCH_DRAWS.split()]
    + [f"random.{name}" for name in _PYTHON_DRAWS.split()]
    + ["torch.utils.data.random_split", "sklearn.model_selection.train_test_split"]
    + ["sklearn.utils.shuffle", "sklearn.utils.resample"]
)

RNG_METHODS = frozenset(f"{_NUMPY_DRAWS} {_PYTHON_DRAWS} random_".split())

SEEDERS = named("""
    torch.manual_seed torch.random.manual_seed random.seed numpy.random.seed
    torch.cuda.manual_seed torch.cuda.manual_seed_all transformers.set_seed
    lightning.seed_everything lightning.pytorch.seed_everything
    pytorch_lightning.seed_everything accelerate.utils.set_seed timm.utils.random_seed
    numpy.random.default_rng random.Random numpy.random.RandomState
""")

TIME = named("""
    time.time time.time_ns time.monotonic time.perf_counter time.process_time
    time.monotonic_ns datetime.datetime.now datetime.datetime.utcnow datetime.date.today
    datetime.datetime.today time.strftime time.localtime time.ctime
""")

ENTROPY = named("""
    os.getpid os.urandom uuid.uuid4 uuid.uuid1 secrets.randbits secrets.randbelow
    secrets.token_bytes secrets.token_hex torch.seed torch.random.seed os.getppid id
""")

RANK = named("""
    torch.distributed.get_rank torch.distributed.get_node_local_rank
    torch.distributed.get_group_rank
""")

WORLD_SIZE = named("torch.distributed.get_world_size torch.cuda.device_count")

RANK_VARIABLES = named("RANK LOCAL_RANK SLURM_PROCID GROUP_RANK")

WORLD_VARIABLES = named("WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NTASKS")

ENVIRONMENT = "os.environ"

ENVIRONMENT_READERS = named("os.getenv os.environ.get")

EXISTENCE = named("""
    os.path.exists os.path.isfile os.path.isdir os.path.getsize os.path.lexists
    os.listdir os.stat
""")

RUNS_PROGRAM = named("""
    os.system subprocess.run subprocess.call subprocess.check_call subprocess.Popen
    os.popen
""")

OUTSIDE = RUNS_PROGRAM | named("""
    requests.post requests.put requests.patch requests.delete requests.request
    httpx.post httpx.put httpx.patch httpx.delete urllib.request.urlopen
    smtplib.SMTP.sendmail os.kill
""")

PORTS = named("""
    socket.create_server socketserver.TCPServer http.server.HTTPServer
    http.server.ThreadingHTTPServer prometheus_client.start_http_server
    torch.distributed.TCPStore
""")

UNREPEATABLE = named("""
    os.rename os.renames os.replace os.remove os.unlink os.rmdir os.removedirs
    shutil.move shutil.rmtree os.mkdir os.link os.symlink
""")

SAVES = named("""
    torch.save torch.jit.save numpy.save numpy.savez numpy.savetxt json.dump pickle.dump
    yaml.dump joblib.dump safetensors.torch.save_file safetensors.torch.save_model
    torchvision.utils.save_image torch.distributed.checkpoint.save
""")

SAVE_METHODS = named("""
    save_pretrained to_csv to_json to_parquet savefig write_text write_bytes save
    push_to_hub save_checkpoint
""")

TRACKING = named("""
    wandb.log mlflow.log_metric mlflow.log_metrics trackio.log swanlab.log
""")

LOGGERS = TRACKING | named("""
    print pprint.pprint logging.info logging.debug logging.warning logging.error
    logging.log logging.critical tqdm.write tqdm.tqdm.write warnings.warn
    sys.stdout.write sys.stderr.write rich.print rich.console.Console.print click.echo
    mlflow.log_param typer.echo
""")

LOG_METHODS = named("""
    info debug warning error critical exception log add_scalar add_scalars add_histogram
    add_image add_text add_figure add_graph log_metric log_metrics set_postfix
    set_postfix_str set_description print add_images report_scalar log_dict log_scalar
    add_hparams add_embedding add_video add_pr_curve add_histograms write_scalars
""")

TRACKER_METHODS = named("""
    log add_scalar add_scalars add_histogram add_image add_text log_metric log_metrics
    log_artifact
""")

LOOKING = named("""
    len isinstance hasattr getattr setattr type str repr id callable print super vars
    dir format bool issubclass delattr
""")

GROWING = named("append extend insert appendleft extendleft")

CONSUMING = named("sum list tuple set dict sorted max min any all")
