"""The service on a GPU with its CUDA-graph engine: the answers of float32, for many clients at once."""

import asyncio
import signal

import pytest
from launch import Client, labels, picture, post, service, tiny

from vitkit.inference.predict import predict
from vitkit.weights.save import save

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", ["torch", "graph", "graph-compiled"])
def test_many_clients_get_the_answers_of_float32(tmp_path, engine):
    model = tiny()
    save(model, tmp_path / "model.safetensors")
    images = [picture(seed) for seed in range(24)]
    want = [dict(predict(model, image, top=5)) for image in images]

    async def ask(port: int) -> list[bytes]:
        async def one(number: int) -> list[bytes]:
            client, bodies = Client(port), []
            for image in images[number::8]:
                status, _, body = await client.ask(post(image))
                assert status == 200, body
                bodies.append(body)
            client.close()
            return bodies

        result = await asyncio.gather(*(one(number) for number in range(8)))
        return [result[i % 8][i // 8] for i in range(len(images))]

    with service(tmp_path / "model.safetensors", "--device", "cuda", "--engine", engine) as running:
        for _ in range(3):
            try:
                bodies = asyncio.run(asyncio.wait_for(ask(running.port), 60))
            except TimeoutError:
                running.process.send_signal(signal.SIGABRT)  # the stacks of its threads go to the log
                running.process.wait(20)
                pytest.fail(running.log.read_text()[-6000:])
            for body, answer in zip(bodies, want, strict=True):
                got = dict(labels(body))
                assert set(got) == set(answer)
                assert all(abs(got[label] - answer[label]) < 0.03 for label in answer)
