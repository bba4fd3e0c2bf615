"""The works that schemes are known to come from, as a bibliography has them.

What a scheme's source calls a work is among its ``marks``: an arXiv number, a DOI, a name with a year.
"""

from typing import NamedTuple


class Work(NamedTuple):
    """A work: its key and kind in a bibliography, its fields, and the words by which sources name it."""

    key: str
    kind: str
    marks: tuple[str, ...]
    fields: dict[str, str]


def _arxiv(number: str) -> dict[str, str]:
    return {"eprint": number, "archiveprefix": "arXiv", "url": f"https://arxiv.org/abs/{number}"}


WORKS = (
    Work(
        "nesgpu",
        "misc",
        ("NESgpu",),
        {
            "title": "{NESgpu}: Optimized {PyTorch} {GPU} implementation of Natural Evolution "
            "Strategies/Augmented Random Search",
            "key": "NESgpu",
            "howpublished": "Software",
            "url": "https://github.com/jamesal1/NESgpu",
        },
    ),
    Work(
        "sarkar2025eggroll",
        "misc",
        ("2511.16652", "EGGROLL"),
        {
            "title": "Evolution Strategies at the Hyperscale",
            "author": "Bidipta Sarkar and Mattie Fellows and Juan Agustin Duque and others",
            "year": "2025",
            **_arxiv("2511.16652"),
        },
    ),
    Work(
        "salimans2017es",
        "misc",
        ("1703.03864", "Salimans"),
        {
            "title": "Evolution Strategies as a Scalable Alternative to Reinforcement Learning",
            "author": "Tim Salimans and Jonathan Ho and Xi Chen and Szymon Sidor and Ilya Sutskever",
            "year": "2017",
            **_arxiv("1703.03864"),
        },
    ),
    Work(
        "wen2018flipout",
        "misc",
        ("1803.04386", "Flipout"),
        {
            "title": "Flipout: Efficient Pseudo-Independent Weight Perturbations on Mini-Batches",
            "author": "Yeming Wen and Paul Vicol and Jimmy Ba and Dustin Tran and Roger Grosse",
            "year": "2018",
            **_arxiv("1803.04386"),
        },
    ),
    Work(
        "choromanski2018structured",
        "misc",
        ("1804.02395", "Choromanski"),
        {
            "title": "Structured Evolution with Compact Architectures for Scalable Policy Optimization",
            "author": "Krzysztof Choromanski and Mark Rowland and Vikas Sindhwani and Richard E. Turner and "
            "Adrian Weller",
            "year": "2018",
            **_arxiv("1804.02395"),
        },
    ),
    Work(
        "ailon2009fjlt",
        "article",
        ("10.1137/060673096", "Ailon and Chazelle"),
        {
            "title": "The Fast {Johnson}--{Lindenstrauss} Transform and Approximate Nearest Neighbors",
            "author": "Nir Ailon and Bernard Chazelle",
            "journal": "SIAM Journal on Computing",
            "year": "2009",
            "doi": "10.1137/060673096",
            "url": "https://doi.org/10.1137/060673096",
        },
    ),
    Work(
        "srivastava2014dropout",
        "article",
        ("Srivastava et al. 2014",),
        {
            "title": "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
            "author": "Nitish Srivastava and Geoffrey Hinton and Alex Krizhevsky and Ilya Sutskever and "
            "Ruslan Salakhutdinov",
            "journal": "Journal of Machine Learning Research",
            "year": "2014",
        },
    ),
    Work(
        "werfel2005learning",
        "article",
        ("Werfel, Xie, Seung 2005",),
        {
            "title": "Learning Curves for Stochastic Gradient Descent in Linear Feedforward Networks",
            "author": "Justin Werfel and Xiaohui Xie and H. Sebastian Seung",
            "journal": "Neural Computation",
            "year": "2005",
        },
    ),
    Work(
        "wan2013dropconnect",
        "inproceedings",
        ("Wan et al. 2013", "(DropConnect)"),
        {
            "title": "Regularization of Neural Networks using {DropConnect}",
            "author": "Li Wan and Matthew Zeiler and Sixin Zhang and Yann {Le Cun} and Rob Fergus",
            "booktitle": "International Conference on Machine Learning",
            "year": "2013",
        },
    ),
    Work(
        "williams1992reinforce",
        "article",
        ("Williams 1992",),
        {
            "title": "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement "
            "Learning",
            "author": "Ronald J. Williams",
            "journal": "Machine Learning",
            "year": "1992",
        },
    ),
    Work(
        "evci2020rigl",
        "inproceedings",
        ("1911.11134", "Evci et al. 2020"),
        {
            "title": "Rigging the Lottery: Making All Tickets Winners",
            "author": "Utku Evci and Trevor Gale and Jacob Menick and Pablo Samuel Castro and Erich Elsen",
            "booktitle": "International Conference on Machine Learning",
            "year": "2020",
            **_arxiv("1911.11134"),
        },
    ),
    Work(
        "mocanu2018set",
        "article",
        ("1707.04780", "Mocanu et al. 2018"),
        {
            "title": "Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity "
            "Inspired by Network Science",
            "author": "Decebal Constantin Mocanu and Elena Mocanu and Peter Stone and Phuong H. Nguyen and "
            "Madeleine Gibescu and Antonio Liotta",
            "journal": "Nature Communications",
            "year": "2018",
            **_arxiv("1707.04780"),
        },
    ),
    Work(
        "lasby2023srigl",
        "misc",
        ("2305.02299", "Lasby et al. 2023"),
        {
            "title": "Dynamic Sparse Training with Structured Sparsity",
            "author": "Mike Lasby and Anna Golubeva and Utku Evci and Mihai Nica and Yani Ioannou",
            "year": "2023",
            **_arxiv("2305.02299"),
        },
    ),
    Work(
        "mishra2021sparse",
        "misc",
        ("2104.08378", "Mishra et al. 2021"),
        {
            "title": "Accelerating Sparse Deep Neural Networks",
            "author": "Asit Mishra and Jorge Albericio Latorre and Jeff Pool and Darko Stosic and "
            "Dusan Stosic and Ganesh Venkatesh and Chong Yu and Paulius Micikevicius",
            "year": "2021",
            **_arxiv("2104.08378"),
        },
    ),
)
