"""What reads one batch: its entries and what they mean, its loss, and its rows and documents run alone.

Read `check` first (`check_batch`, `check_loss`). `rows` makes a batch of rows of data, `reading` says what its entries
mean, `labels` and `checks` look for mistakes. `targets` runs a loss and reads what it trains off its gradients, `loss`
compares that with the labels, and `ranks` puts together what several processes read. `alone` compares rows and
documents, which `cutting` cuts out, with themselves alone.
"""
