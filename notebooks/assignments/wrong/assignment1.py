"""Wrong solutions of assignment 1, each a likely one. The docstring is what the student must read."""

import torch


def group_advantages__statistics_over_the_batch(rewards):
    """its own group"""
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def group_advantages__sample_std(rewards):
    """not of a sample"""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    return torch.where(rewards.amax(1, True) == rewards.amin(1, True), 0.0, centred / std)


def group_advantages__constant_zero(rewards):
    """all advantages are 0"""
    return torch.zeros_like(rewards)
