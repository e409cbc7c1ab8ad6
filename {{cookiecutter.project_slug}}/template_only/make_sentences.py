"""Writes sentences.json of the text example: short sentences on four topics in three languages, made from patterns.

python template_only/make_sentences.py examples/text/sentences.json

The patterns were written for this template. Topics share most words, so that a single word rarely gives the topic away.
"""
# ruff: noqa: RUF001 - Chinese and Japanese sentences have their own punctuation

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_SENTENCES = 600
SLOTS = {
    "day": "Today|Yesterday|On Monday|Last week|This morning|On Sunday|In May|At noon",
    "city": "Oslo|Kyoto|Lima|the old town|the capital|my village|the harbour|the mountains",
    "who": "my sister|our neighbour|the driver|a colleague|my father|the whole family|our guide|an old friend",
    "日": "今天|昨天|星期一|上周|今天早上|周末|五月|中午",
    "地": "北京|上海|老城|海边|山里|我家|车站|学校",
    "谁": "妈妈|同事|邻居|司机|朋友|爸爸|老师|我们",
    "にち": "今日|昨日|月曜日|先週|今朝|日曜日|五月|昼",
    "ばしょ": "京都|大阪|旧市街|海|山|実家|駅|学校",
    "ひと": "母|同僚|隣の人|運転手|友だち|父|先生|家族",
}
PATTERNS = {
    "weather": """
        {day} it rained in {city} until the evening.
        {day} the sun was out over {city}, but a cold wind blew.
        {who} says that snow will reach {city} soon.
        Thick fog in {city}: {who} could not see the road.
        {day} we had thirty degrees in the shade, said {who}.
        A storm is coming, {who} closed all the windows.
        How long will this heat over {city} last?
        {日}{地}下了一整天的雨。
        {日}天气很好，{地}的阳光很暖和。
        {谁}说{地}明天会下雪。
        {地}雾太大，{谁}看不清路。
        {日}太热了，{地}有三十八度。
        台风要来了，{谁}把窗户都关上了。
        {地}的风什么时候才停？
        {にち}は{ばしょ}で一日中雨が降った。
        {にち}は晴れて、{ばしょ}は暖かかった。
        {ひと}は{ばしょ}に雪が降ると言った。
        霧が濃くて、{ひと}は道が見えなかった。
        {にち}の{ばしょ}は三十五度もあった。
        台風が来るので、{ひと}は窓を閉めた。
        {ばしょ}の暑さはいつまで続くのだろう。""",
    "food": """
        {day} {who} cooked rice with mushrooms for us.
        The soup in {city} was cold, and {who} sent it back.
        {day} we ate grilled fish by the road to {city}.
        {who} bakes the best bread in {city}.
        Is there a good noodle shop near {city}?
        {who} put far too much salt into the salad.
        {day} breakfast was tea, an egg and a warm roll.
        {日}{谁}给我们做了蘑菇炒饭。
        {地}的面条又辣又香。
        {谁}觉得这个汤太咸了。
        {日}我们在{地}吃了烤鱼。
        {地}附近有没有好吃的饺子？
        {谁}早饭只喝茶，吃一个鸡蛋。
        {日}的菜太油，{谁}没吃几口。
        {にち}、{ひと}がきのこご飯を作ってくれた。
        {ばしょ}のラーメンは辛くておいしい。
        {ひと}はこのスープが塩からいと言った。
        {にち}、{ばしょ}で焼き魚を食べた。
        {ばしょ}の近くにおいしいそば屋はありますか。
        {ひと}の朝ご飯はお茶と卵だけだ。
        {にち}の弁当は{ひと}が半分残した。""",
    "travel": """
        {day} the train to {city} left an hour late.
        {who} flew to {city} with one small bag.
        {day} we changed buses twice on the way to {city}.
        The ticket to {city} is in my passport, says {who}.
        {who} waited at the station in the rain.
        How far is it from {city} to the airport?
        Our hotel in {city} has a view of the sea.
        {日}去{地}的火车晚点了一个小时。
        {谁}只带了一个小包就飞去{地}了。
        {日}我们换了两次车才到{地}。
        去{地}的票在{谁}那里。
        {谁}下雨的时候还在等车。
        从{地}到机场有多远？
        我们在{地}住的酒店能看到海。
        {にち}、{ばしょ}行きの電車が一時間遅れた。
        {ひと}は小さなかばん一つで{ばしょ}へ飛んだ。
        {にち}、バスを二回乗り換えて{ばしょ}に着いた。
        {ばしょ}までの切符は{ひと}が持っている。
        {ひと}は雨の中、駅で待っていた。
        {ばしょ}から空港までどのくらいですか。
        {ばしょ}のホテルから海が見えた。""",
    "money": """
        {day} {who} lent me twenty for the taxi.
        The rent in {city} has doubled in two years.
        {day} I paid too much for a ticket, said {who}.
        {who} saves a tenth of every salary.
        Can I change money in {city}?
        The bank in {city} closed my account.
        {who} still owes me for the bread and the fish.
        {日}{谁}借给我二十块打车。
        {地}的房租两年涨了一倍。
        {谁}说这张票买贵了。
        {谁}每个月存一点工资。
        在{地}能换钱吗？
        {日}银行的账户被关了，{谁}很着急。
        {谁}还欠我饭钱。
        {にち}、{ひと}がタクシー代を貸してくれた。
        {ばしょ}の家賃は二年で倍になった。
        {ひと}はこの切符は高すぎたと言った。
        {ひと}は毎月給料の一割を貯金している。
        {ばしょ}で両替はできますか。
        {にち}、銀行の口座が使えなくなった。
        {ひと}はまだ昼ご飯の代金を返していない。""",
}


def make_sentences(num_sentences: int) -> list[tuple[str, str]]:
    """Return different sentences in random order, each with its topic. All topics have the same number of sentences."""
    generator = random.Random(0)
    rows: dict[str, str] = {}
    topics = list(PATTERNS)
    while len(rows) < num_sentences:
        topic = topics[len(rows) % len(topics)]
        sentence = generator.choice(PATTERNS[topic].strip().split("\n")).strip()
        for slot, fillers in SLOTS.items():
            sentence = sentence.replace(f"{{{slot}}}", generator.choice(fillers.split("|")))
        rows.setdefault(sentence[0].upper() + sentence[1:], topic)
    sentences = list(rows.items())
    generator.shuffle(sentences)
    return sentences


def as_json(sentences: list[tuple[str, str]]) -> str:
    """Return a JSON list with one row per line, so that an error message about a row can name its line."""
    lines = [json.dumps(row, ensure_ascii=False) for row in sentences]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_json(make_sentences(NUM_SENTENCES)), encoding="utf-8")
