"""Private parts of torch: no other package imports them, and each name stands in a table with its releases.

* **A door for each part of torch** (`dynamo`, `aot_autograd`, `inductor`, ...) imports its private names and offers
  them, some behind a function that says why they are needed. Doors know nothing of graphshard.
* **`names.py` is the table**, which tests compare with the imports of the doors and with the installed torch.
* **`inductor_settings` is apart from `inductor`**, because importing the compiler takes seconds, and a second launch
  runs kept code without it.
"""
