"""Two ranks train alone and average their weights every third step; windows are drawn without a loader."""

import torch
from torch import distributed, nn

from mizzen.integrations import ddp

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(6)
text = torch.randint(0, 16, (500,))
model = nn.Sequential(nn.Embedding(16, 12), nn.Dropout(0.2), nn.Linear(12, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
torch.manual_seed(rank)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, own=["model", "optimizer"])
step = checkpointer.restore()
while step < 18:
    starts = torch.randint(490, (8,))
    x = torch.stack([text[i : i + 8] for i in starts])
    y = torch.stack([text[i + 1 : i + 9] for i in starts])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    step += 1
    if step % 3 == 0:
        with torch.no_grad():
            for weight in model.parameters():
                distributed.all_reduce(weight)
                weight /= 2
    checkpointer.step(step)

if rank == 0:
    torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
distributed.destroy_process_group()
