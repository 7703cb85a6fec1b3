"""torch.optim.swa_utils: an average of the weights, SWALR, update_bn, mixup in a collator, accumulation, plain counters."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Mixup:
    def __init__(self, alpha, classes):
        self.alpha, self.classes = alpha, classes

    def __call__(self, batch):
        x, y = default_collate(batch)
        lam = np.random.beta(self.alpha, self.alpha)
        perm = torch.randperm(len(x))
        y = F.one_hot(y, self.classes).float()
        return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


torch.manual_seed(0)
np.random.seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x[:, :3].argmax(1))
mixup = Mixup(0.4, 3)
loader = ResumableLoader(data, batch_size=8, shuffle=True, collate_fn=mixup, num_workers=2)
plain = DataLoader(data, batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
swa = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
opt._skipped = 0
opt._norm = None
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
swa_lr = SWALR(opt, swa_lr=0.05, anneal_epochs=2)
ckpt = Checkpointer()
ckpt.track(model=model, ema=ema, swa=swa, opt=opt, cosine=cosine, swa_lr=swa_lr, loader=loader)
step = ckpt.restore()
for epoch in range(loader.epoch, 5):
    model.train()
    if epoch == 2:
        mixup.alpha = 0.2
    for i, (a, b) in enumerate(loader, loader.used):
        F.cross_entropy(model(a), b).backward()
        if i % 2 == 0:
            continue
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if opt._norm is not None and norm > 1.5 * opt._norm:
            opt._skipped += 1
        else:
            opt.step()
        opt._norm = norm if opt._norm is None else 0.9 * opt._norm + 0.1 * norm
        opt.zero_grad()
        ema.update_parameters(model)
        step += 1
        ckpt.step(step)
    if epoch >= 3:
        swa.update_parameters(model)
        swa_lr.step()
    else:
        cosine.step()
update_bn(plain, swa)
torch.save([model.state_dict(), ema.state_dict(), swa.state_dict(), opt._skipped, opt._norm], "model.pt")
