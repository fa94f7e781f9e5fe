"""Mistakes to plant in the scripts of `styles`: what to replace, and what is found."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A script, the code of the rule that finds the mistake, and pairs of texts."""

    script: str
    code: str
    edits: tuple[tuple[str, str], ...]


MISTAKES = [
    Mistake(
        "kfold",
        "ER206",
        (("remaining_epochs_until(first + EPOCHS)", "remaining_epochs_until(EPOCHS)"),),
    ),
    Mistake(
        "kfold",
        "ER101",
        (
            (
                "        model.eval()\n        for x, y in val",
                "        scheduler.step()\n        model.eval()\n        for x, y in val",
            ),
        ),
    ),
    Mistake(
        "kfold",
        "ER501",
        (
            (
                "StratifiedKFold(K, shuffle=True, random_state=1)",
                "StratifiedKFold(K, shuffle=True)",
            ),
        ),
    ),
    Mistake(
        "kfold", "ER501", (("np.random.default_rng(0)", "np.random.default_rng()"),)
    ),
    Mistake(
        "kfold",
        "ER301",
        (
            (
                '    scores = Variables(name="scores", last=[0.0] * K)',
                "    import types\n    scores = types.SimpleNamespace(last=[0.0] * K)",
            ),
        ),
    ),
    Mistake(
        "kfold",
        "ER103",
        (
            (
                "        model.train()\n        for x, y in train_loader:",
                "        scores.last.append(0.0)\n        model.train()\n        for x, y in train_loader:",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER107",
        (
            (
                "        net.eval()\n        for x, y in probe",
                "        model.module.update_target(0.99)\n        net.eval()\n        for x, y in probe",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER306",
        (
            (
                "    register(probe=probe, probe_opt=probe_opt)\n",
                "    register(probe=probe)\n",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER306",
        (
            (
                "    register(probe=probe, probe_opt=probe_opt)\n",
                "    register(probe_opt=probe_opt)\n",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER101",
        (
            (
                "        net.eval()\n        for x, y in probe",
                "        sched.step()\n        net.eval()\n        for x, y in probe",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER107",
        (
            (
                "        net.eval()\n        for x, y in probe",
                "        probe.reset_parameters()\n        net.eval()\n        for x, y in probe",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER203",
        (
            (
                "for v1, v2 in loader:",
                "for (v1, v2), (x, y) in zip(loader, probe_loader):",
            ),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER301",
        (
            ("    v = Variables(step=0)\n", "    step = 0\n"),
            (
                'cosine_momentum(v.step, cfg["steps"])',
                'cosine_momentum(step, cfg["steps"])',
            ),
            ("v.step += 1", "step += 1"),
        ),
    ),
    Mistake(
        "self_supervised",
        "ER204",
        (
            (
                "            probe_opt.step()\n        if",
                "            probe_opt.step()\n            for a, b in probe_loader:\n                pass\n        if",
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER101",
        (
            (
                "        net.eval()\n        for task in tasks",
                "        scheduler.step()\n        net.eval()\n        for task in tasks",
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER101",
        (
            (
                "                weighted.backward()\n                optimizer.step()\n",
                "                weighted.backward()\n                optimizer.step()\n            scheduler.step()\n",
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER301",
        (
            (
                '    best = er.Variables(total=float("inf"), per_task={t: float("inf") for t in tasks})',
                '    from types import SimpleNamespace\n    best = SimpleNamespace(total=float("inf"), per_task={t: float("inf") for t in tasks})',
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER211",
        (
            (
                '{t: er.AdaptiveDataLoader(valid_sets[t], 64, even_batches=False, name=f"val-{t}") for t in tasks}',
                "{t: torch.utils.data.DataLoader(valid_sets[t], 64) for t in tasks}",
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER109",
        (
            (
                "        for task, loader in train.items():\n            for x, y in loader:",
                "        import random\n        order = list(train)\n        random.shuffle(order)\n        for task in order:\n            for x, y in train[task]:",
            ),
        ),
    ),
    Mistake(
        "multitask",
        "ER402",
        (
            (
                "        net.train()\n",
                "        net.train()\n        extra = er.Variables(name='x', a=0)\n",
            ),
        ),
    ),
    Mistake(
        "callback_framework",
        "ER101|ER102",
        (
            (
                '            self.callbacks.fire("on_epoch_begin", epoch)\n            self._train(train)\n',
                '            self._train(train)\n            self.callbacks.fire("on_epoch_end", epoch, {"val_loss": 0})\n',
            ),
        ),
    ),
    Mistake(
        "callback_framework",
        "ER301",
        (
            (
                '        self.state = Variables(name="early_stopping", best=float("inf"), wait=0)',
                "        self.state = type('S', (), {})(); self.state.best = 0.0; self.state.wait = 0",
            ),
        ),
    ),
    Mistake(
        "callback_framework",
        "ER104",
        (
            (
                "    def on_epoch_begin(self, epoch):\n        self.t0",
                "    def on_epoch_begin(self, epoch):\n        open('times.txt', 'a').write('begin')\n        self.t0",
            ),
        ),
    ),
    Mistake(
        "callback_framework",
        "ER306",
        (
            (
                "(net, optimizer, scheduler)\n        self.stopping",
                "(net, optimizer)\n        self.stopping",
            ),
        ),
    ),
    Mistake(
        "callback_framework",
        "ER210",
        (
            (
                "            self._train(train)\n",
                "            try:\n                self._train(train)\n            except:\n                print('failed')\n",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER306",
        (
            (
                "register(model=whole, optimizer=opt, scheduler=sched)",
                "register(model=whole, optimizer=opt)",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER306",
        (
            (
                "register(model=whole, optimizer=opt, scheduler=sched)",
                "register(optimizer=opt, scheduler=sched)",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER401",
        (
            (
                "        dist.barrier()",
                "        if elasticrun.rank() == 0:\n            dist.barrier()",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER401",
        (
            (
                "                mean = reduce_mean(loss.detach().clone())\n                if elasticrun.rank() == 0:\n",
                "                if elasticrun.rank() == 0:\n                    mean = reduce_mean(loss.detach().clone())\n",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER304",
        (
            (
                "in loader.enumerate():\n            out",
                "in enumerate(loader):\n            if step < 5: opt.param_groups[0]['lr'] = step * 0.1\n            out",
            ),
        ),
    ),
    Mistake(
        "transformer_ddp",
        "ER101",
        (
            (
                "        dist.barrier()",
                "        for x in loader:\n            ddp(x)\n        sched.step()\n        for x in loader:\n            ddp(x)",
            ),
        ),
    ),
    Mistake(
        "configured",
        "ER101",
        (
            (
                "        val = evaluate(ddp, valid_dl, total)\n        scheduler.step()\n",
                "        scheduler.step()\n        val = evaluate(ddp, valid_dl, total)\n",
            ),
        ),
    ),
    Mistake(
        "configured", "ER301", (("    elasticrun.register(train_state=state)\n", ""),)
    ),
    Mistake(
        "configured",
        "ER306",
        (
            (
                "AdaptiveDataParallel(model, optimizer, scheduler)",
                "AdaptiveDataParallel(model, optimizer)",
            ),
        ),
    ),
    Mistake(
        "configured",
        "ER103",
        (
            (
                "        for x, y in train_dl:\n",
                "        state.history.append(epoch)\n        for x, y in train_dl:\n",
            ),
        ),
    ),
    Mistake(
        "configured",
        "ER102",
        (
            (
                "        for x, y in train_dl:\n",
                "        state.since_best += 1\n        for x, y in train_dl:\n",
            ),
        ),
    ),
    Mistake(
        "configured",
        "ER106",
        (
            (
                "run_dir.mkdir(parents=True, exist_ok=True)",
                "run_dir.mkdir(parents=True)",
            ),
        ),
    ),
    Mistake(
        "configured",
        "ER502",
        (("shuffle=True, seed=cfg.seed)", "shuffle=True, seed=torch.seed())"),),
    ),
    Mistake(
        "closures",
        "ER101",
        (
            (
                "        rate = test(test_loader, acc)\n        finish(epoch, rate)",
                "        finish(epoch, 0)\n        rate = test(test_loader, acc)",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER103",
        (
            (
                "        rate = test(test_loader, acc)\n        finish(epoch, rate)",
                "        finish(epoch, 0)\n        rate = test(test_loader, acc)",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER306",
        (("AdaptiveDataParallel(net, opt, sched)", "AdaptiveDataParallel(net, opt)"),),
    ),
    Mistake(
        "closures",
        "ER301",
        (
            (
                "    def step(x, y):\n        opt.zero_grad()",
                "    seen = 0\n\n    def step(x, y):\n        nonlocal seen\n        seen += len(x)\n        if seen > 1000: opt.param_groups[0]['lr'] = 0.1\n        opt.zero_grad()",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER103",
        (
            (
                "        model.eval()\n        for x, y in loader",
                "        model.eval()\n        log.lines.append('test')\n        for x, y in loader",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER304",
        (
            (
                "        for i, (x, y) in loader.enumerate():\n",
                "        for i, (x, y) in enumerate(loader):\n            sched.step(i)\n",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER002",
        (
            (
                "    for epoch in el.remaining_epochs_until(epochs):\n        train_epoch(train)",
                "    for epoch in range(epochs):\n        train_epoch(train)",
            ),
        ),
    ),
    Mistake(
        "closures",
        "ER502",
        (
            (
                "    torch.manual_seed(7)\n    el.init()",
                "    torch.manual_seed(int(time.time()))\n    el.init()",
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER306",
        (
            (
                "register(encoder=encoder, decoder=decoder, optimizer=optimizer, plateau=plateau)",
                "register(encoder=encoder, decoder=decoder, optimizer=optimizer)",
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER306",
        (
            (
                "register(encoder=encoder, decoder=decoder, optimizer=optimizer, plateau=plateau)",
                "register(encoder=encoder, decoder=decoder, plateau=plateau)",
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER101",
        (
            (
                "        with evaluating(enc, dec):\n",
                "        plateau.step(loss.item())\n        with evaluating(enc, dec):\n",
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER104",
        (
            (
                "        with evaluating(enc, dec):\n",
                "        if rank() == 0:\n            table.add(epoch=epoch, ppl=0)\n        with evaluating(enc, dec):\n",
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER105",
        (
            (
                '        if not os.path.exists(path):\n            with open(path, "w", newline="") as f:\n                csv.DictWriter(f, fields).writeheader()',
                '        with open(path, "w", newline="") as f:\n            csv.DictWriter(f, fields).writeheader()',
            ),
        ),
    ),
    Mistake(
        "generators",
        "ER302|ER301",
        (("v = Variables(nll=0.0, tokens=0, best=None)", "v = args"),),
    ),
    Mistake(
        "generators",
        "ER304",
        (
            (
                "    for index, batch in loader.enumerate():\n",
                "    for index, batch in enumerate(loader):\n        if index > 100: torch.save(batch, f'{index}.pt')\n",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER108",
        (
            (
                "        net.eval()\n        with torch.no_grad():",
                "        for g in optimizer.param_groups: g['lr'] *= 0.97\n        net.eval()\n        with torch.no_grad():",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER108",
        (
            (
                '    lr = base\n    for m in milestones:\n        if epoch >= m:\n            lr *= 0.1\n    for g in optimizer.param_groups:\n        g["lr"] = lr\n',
                "    lr = base\n    for g in optimizer.param_groups:\n        if epoch in milestones:\n            g[\"lr\"] = g['lr'] * 0.1\n",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER301",
        (
            (
                "    book = Variables(best=0.0, hits=0, seen=0)",
                "    class Book: best = 0.0; hits = 0; seen = 0\n    book = Book()",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER306",
        (
            (
                "AdaptiveDataParallel(student, optimizer)",
                "AdaptiveDataParallel(student)",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER107",
        (
            (
                "        net.train()\n        for",
                "        nn.init.normal_(student.fc.weight)\n        net.train()\n        for",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER211",
        (
            (
                "te = AdaptiveDataLoader(torchvision",
                "te = torch.utils.data.DataLoader(torchvision",
            ),
            (", opt.bs, even_batches=False)", ", opt.bs)"),
        ),
    ),
    Mistake(
        "distillation",
        "ER107",
        (
            (
                "            optimizer.step()\n        net.eval()",
                "            optimizer.step()\n        optimizer.step()\n        net.eval()",
            ),
        ),
    ),
    Mistake(
        "distillation",
        "ER401",
        (
            (
                "        acc = elasticrun_mean(book)",
                "        if elasticrun.rank() == 0:\n            acc = elasticrun_mean(book)",
            ),
        ),
    ),
    Mistake("wasserstein", "ER306", (("opt_g=self.opt_g, ", ""),)),
    Mistake("wasserstein", "ER306", (("G=self.G, ", ""),)),
    Mistake(
        "wasserstein",
        "ER301",
        (
            ("self.state = Variables(iteration=0)", "self.iteration = 0"),
            ("self.state.iteration", "self.iteration"),
            ("self.state.iteration", "self.iteration"),
            ("self.state.iteration", "self.iteration"),
            ("self.state.iteration", "self.iteration"),
        ),
    ),
    Mistake(
        "wasserstein",
        "ER207",
        (
            (
                "            for real, _ in loader:\n",
                "            it = iter(loader)\n            for _ in range(len(loader)):\n                real, _ = next(it)\n",
            ),
        ),
    ),
    Mistake(
        "wasserstein",
        "ER102",
        (
            (
                "            for real, _ in loader:\n",
                "            self.state.iteration += 1\n            for real, _ in loader:\n",
            ),
        ),
    ),
    Mistake(
        "wasserstein",
        "ER109",
        (
            (
                "            for real, _ in loader:\n",
                "            self.z_fixed = torch.randn(64, self.hp.z)\n            for real, _ in loader:\n",
            ),
        ),
    ),
    Mistake(
        "wasserstein",
        "ER501",
        (("generator=gen)", "device='cpu')"), ("    torch.manual_seed(hp.seed)\n", "")),
    ),
    Mistake(
        "wasserstein",
        "ER106",
        (
            (
                "    os.makedirs(hp.out, exist_ok=True)",
                "    os.rename(hp.out / 'old', hp.out / 'older')",
            ),
        ),
    ),
    Mistake(
        "progressive",
        "ER206",
        (
            (
                "(32, 256, 10), (64, 128, 20), (128, 64, 30)",
                "(32, 256, 10), (64, 128, 10), (128, 64, 10)",
            ),
        ),
    ),
    Mistake(
        "progressive",
        "ER102",
        (
            (
                "            for x, y in test:\n",
                "            score.total += 1\n            for x, y in test:\n",
            ),
        ),
    ),
    Mistake(
        "progressive",
        "ER108",
        (
            (
                '            for group in opt.param_groups:\n                group["lr"] = 0.1 * 0.5 ** ((epoch - done) // 3)\n',
                '            for group in opt.param_groups:\n                group["lr"] *= 0.5\n',
            ),
        ),
    ),
    Mistake(
        "progressive",
        "ER204",
        (
            (
                "            for x, y in train:\n                opt",
                "            for x, y in train:\n                for a, b in train:\n                    model(a)\n                opt",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER303",
        (
            (
                "[self.num_updates, self.best_loss, self.nll, self.ntok], fileobj",
                "[self.num_updates, self.best_loss, self.nll], fileobj",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER303",
        (
            (
                "self.num_updates, self.best_loss, self.nll, self.ntok = torch.load",
                "self.num_updates, self.best_loss, self.nll, _ = torch.load",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER102",
        (
            (
                "        train(cfg, trainer, itr)\n        loss",
                "        train(cfg, trainer, itr)\n        trainer.progress.num_updates += 1\n        loss",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER301",
        (
            ("class Progress(State):", "class Progress:"),
            ('        super().__init__("progress")\n', ""),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER306",
        (
            (
                "self._model = AdaptiveDataParallel(self._net, self._optimizer)",
                "self._model = AdaptiveDataParallel(self._net)",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER205|ER204",
        (
            (
                "        log = trainer.train_step(sample)\n",
                "        log = trainer.train_step(sample)\n        if i % 1000 == 0: validate(trainer, {'a': AdaptiveDataLoader(trainer.task.dataset('x'), 4)})\n",
            ),
        ),
    ),
    Mistake(
        "large_trainer",
        "ER104",
        (
            (
                "    losses = []\n    for subset",
                "    losses = []\n    with open('valid.log', 'a') as f: print('valid', file=f)\n    for subset",
            ),
        ),
    ),
    Mistake(
        "semi_supervised",
        "ER306",
        (("    elasticrun.register(teacher=teacher)\n", ""),),
    ),
    Mistake(
        "semi_supervised",
        "ER107",
        (
            (
                "        net.eval()\n        with",
                "        teacher.update()\n        net.eval()\n        with",
            ),
        ),
    ),
    Mistake(
        "semi_supervised",
        "ER101",
        (
            (
                "        net.eval()\n        with",
                "        sch.step()\n        net.eval()\n        with",
            ),
        ),
    ),
    Mistake(
        "semi_supervised",
        "ER301",
        (
            (
                "v = Variables(step=0, right=0, count=0)",
                "v = dict(step=0, right=0, count=0)",
            ),
            ("v.step", "v['step']"),
            ("v.step", "v['step']"),
            ("v.right += ", "v['right'] += "),
            ("v.count += ", "v['count'] +="),
            ("v.right / v.count", "v['right'] / v['count']"),
            ("v.right = v.count", "v['right'] = v['count']"),
        ),
    ),
    Mistake(
        "semi_supervised",
        "ER109",
        (
            (
                "        net.train()\n        for",
                "        lam = np.random.beta(1.0, 1.0)\n        net.train()\n        for",
            ),
        ),
    ),
    Mistake(
        "semi_supervised",
        "ER302",
        (
            ("        v.right = v.count = 0\n", ""),
            (
                "        net.eval()\n        with",
                "        v.right = v.count = 0\n        net.eval()\n        with",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER101",
        (
            (
                "            self.val_epoch(loaders.val)\n            self.on_epoch_end()",
                "            self.on_epoch_end()\n            self.val_epoch(loaders.val)",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER306",
        (
            (
                "self.optimizer, self.scheduler)\n        self.outputs",
                "self.optimizer)\n        self.outputs",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER402",
        (
            (
                "            self.train_epoch(loaders.train)\n",
                "            loaders = datamodule.loaders()\n            self.train_epoch(loaders.train)\n",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER501",
        (
            ("torch.Generator().manual_seed(42)\n", ""),
            ("    torch.manual_seed(0)\n", ""),
        ),
    ),
    Mistake(
        "data_module",
        "ER101",
        (
            (
                "        self.module.train()\n\n",
                "        self.module.train()\n        self.scheduler.step()\n\n",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER203",
        (
            (
                "        for batch in loader:\n            self.outputs",
                "        for batch in zip(loader, loader):\n            self.outputs",
            ),
        ),
    ),
    Mistake(
        "data_module",
        "ER204",
        (
            (
                'name="val")\n',
                'name="val")\n\n    def peek(self):\n        return next(iter(self.train_dataloader()))\n',
            ),
            (
                "        loaders = datamodule.loaders()\n",
                "        loaders = datamodule.loaders()\n        datamodule.peek()\n",
            ),
        ),
    ),
    Mistake(
        "tagging",
        "ER301",
        (
            (
                "register(net=net, patience=patience, tally=tally)",
                "register(net=net, tally=tally)",
            ),
        ),
    ),
    Mistake(
        "tagging",
        "ER301|ER302",
        (
            (
                "register(net=net, patience=patience, tally=tally)",
                "register(net=net, patience=patience)",
            ),
        ),
    ),
    Mistake(
        "tagging",
        "ER306",
        (
            (
                "register(net=net, patience=patience, tally=tally)",
                "register(patience=patience, tally=tally)",
            ),
        ),
    ),
    Mistake(
        "tagging",
        "ER306",
        (('    register(**{f"sched_{k}": v for k, v in schedulers.items()})\n', ""),),
    ),
    Mistake(
        "tagging",
        "ER101",
        (
            (
                "            net.eval()\n            with",
                "            for scheduler in schedulers.values():\n                scheduler.step()\n            net.eval()\n            with",
            ),
        ),
    ),
    Mistake(
        "tagging",
        "ER401",
        (("        if epoch % 2 == 1:", "        if elasticrun.rank() == 0:"),),
    ),
    Mistake(
        "tagging",
        "ER102",
        (
            (
                "        net.train()\n        for",
                "        patience.improved(0.1)\n        net.train()\n        for",
            ),
        ),
    ),
    Mistake(
        "regression",
        "ER306",
        (
            (
                "ddp = elasticrun.AdaptiveDataParallel(model, opt)",
                "ddp = elasticrun.AdaptiveDataParallel(model)",
            ),
        ),
    ),
    Mistake(
        "regression",
        "ER501",
        (("np.random.RandomState(0)", "np.random.RandomState()"),),
    ),
    Mistake(
        "regression",
        "ER108",
        (
            (
                "    for xb, yb in loader:\n",
                "    for g in opt.param_groups: g['lr'] *= 0.95\n    for xb, yb in loader:\n",
            ),
        ),
    ),
    Mistake(
        "regression",
        "ER502",
        (("torch.manual_seed(0)", "torch.manual_seed(np.random.randint(1000))"),),
    ),
    Mistake(
        "regression",
        "ER503",
        (("batch_size=50,", "batch_size=50 * elasticrun.world_size(),"),),
    ),
    Mistake(
        "metric_learning",
        "ER110",
        (
            (
                "    writer = SummaryWriter(str(args.logdir)) if elasticrun.rank() == 0 else None",
                "    import wandb\n    wandb.init(project='x')\n    writer = None",
            ),
        ),
    ),
    Mistake(
        "metric_learning",
        "ER101",
        (
            (
                "        recall = recall_at_1(embed_all(net, gallery, device), labels)\n        sched.step()",
                "        sched.step()\n        for x, y in loader:\n            pass\n        recall = recall_at_1(embed_all(net, gallery, device), labels)",
            ),
        ),
    ),
    Mistake(
        "metric_learning",
        "ER301",
        (
            (
                "var = Variables(best=0.0, step=0)",
                "var = argparse.Namespace(best=0.0, step=0)",
            ),
        ),
    ),
    Mistake(
        "metric_learning",
        "ER306",
        (
            (
                "AdaptiveDataParallel(net, optim, sched)",
                "AdaptiveDataParallel(net, optim)",
            ),
        ),
    ),
    Mistake(
        "metric_learning",
        "ER306",
        (
            (
                "AdaptiveDataParallel(net, optim, sched)",
                "AdaptiveDataParallel(net, lr_scheduler=sched)",
            ),
        ),
    ),
    Mistake(
        "metric_learning",
        "ER304",
        (
            (
                "        net.train()\n        for x, y in loader:\n",
                "        net.train()\n        for step, (x, y) in enumerate(loader):\n            if writer: writer.add_scalar('x', 1, step)\n",
            ),
        ),
    ),
    Mistake(
        "speech",
        "ER102|ER108",
        (
            (
                "        phase.advance(wer, wer_of.last)\n        wer_of.last = wer\n",
                "",
            ),
            (
                "        model.eval()\n        for spec",
                "        phase.plateaus += 1\n        model.eval()\n        for spec",
            ),
        ),
    ),
    Mistake(
        "speech",
        "ER301",
        (
            (
                "phase, wer_of = Phase(), Variables(last=None)",
                "phase, wer_of = Phase(), type('X', (), {'last': None})()",
            ),
        ),
    ),
    Mistake("speech", "ER303", (('        self.plateaus = state["plateaus"]\n', ""),)),
    Mistake(
        "speech",
        "ER208",
        (
            (
                "            if not math.isfinite(loss.item()):\n                request_checkpoint()",
                "            if torch.rand(()) < 0.01:\n                break",
            ),
        ),
    ),
    Mistake(
        "speech",
        "ER101",
        (
            ("            sched.step()\n", ""),
            (
                "        model.eval()\n        for spec",
                "        sched.step()\n        model.eval()\n        for spec",
            ),
        ),
    ),
    Mistake(
        "speech",
        "ER210",
        (
            (
                "        model.train()\n        for spec",
                "        model.train()\n        try:\n          for spec, text, lengths in train_loader:\n            model(spec)\n        except:\n          pass\n        for spec",
            ),
        ),
    ),
]
