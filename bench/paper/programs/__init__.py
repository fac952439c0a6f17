"""The programs of the paper's evaluation, in its order."""

from bench.paper.programs import agents, branches, chats, documents, few_shot, forms, pictures, trees
from bench.paper.workload import Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for module in (few_shot, agents, trees, branches, forms, chats, documents, pictures)
    for workload in module.WORKLOADS
}
