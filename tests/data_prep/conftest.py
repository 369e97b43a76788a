import pytest


@pytest.fixture(scope="session")
def s3():
    """An S3 server on this machine, for this process and the ones it starts: its file system.

    One for all tests, since fsspec keeps the file systems that it has made, endpoints included.
    """
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield fsspec.filesystem("s3", use_listings_cache=False)
    server.stop()
