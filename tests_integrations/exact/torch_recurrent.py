"""An LSTM that reads a text in chunks, with a position and a hidden state in objects of the script's own classes."""

import math

import torch
from torch import nn

from mizzen import Checkpointer


class Text:
    """Reads a text in chunks, again and again."""

    def __init__(self, tokens, rows, length):
        self.tokens, self.length = tokens.view(rows, -1), length
        self.position = 0

    def next(self):
        if self.position + self.length + 1 > self.tokens.size(1):
            self.position = 0
        chunk = self.tokens[:, self.position : self.position + self.length + 1]
        self.position += self.length
        return chunk[:, :-1], chunk[:, 1:]


class Hidden:
    """The hidden state after the last chunk."""

    def __init__(self):
        self.state = None

    def take(self):
        return None if self.state is None else tuple(one.detach() for one in self.state)

    def put(self, state):
        self.state = tuple(one.detach() for one in state)


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.body = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 10))

    def forward(self, tokens, state):
        found, state = self.body(self.embedding(tokens), state)
        return self.head(found), state


torch.manual_seed(0)
text, hidden = Text(torch.randint(0, 10, (4 * 90,)), 4, 8), Hidden()
model = Model()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, text=text, hidden=hidden)
step = checkpointer.restore()
average = None
while step < 45:
    tokens, wanted = text.next()
    found, state = model(tokens, hidden.take())
    hidden.put(state)
    loss = nn.functional.cross_entropy(found.reshape(-1, 10), wanted.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
    step += 1
    if step % 9 == 0:
        print(step, math.exp(average))
    checkpointer.step(step)
torch.save([model.state_dict(), optimizer.state_dict(), text.position], "model.pt")
